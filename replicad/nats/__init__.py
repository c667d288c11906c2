"""NATS JetStream as a way out: a program publishes the rows of one stream, each of them once (docs/nats.md).

`relay` is the program's work, `cli` its command. It is a client of the daemon, and keeps its place in JetStream itself.
"""
