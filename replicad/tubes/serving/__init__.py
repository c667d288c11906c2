"""Tubes in the daemon: the answers to clients' requests, and the waits for new pods."""
