"""Clients of the daemon: `blocking` needs nothing but the standard library, `trio_client` is its asynchronous twin.

What both do is written once, without I/O: `follower` and `pursuit` for streams, `requests` and `pods` for tubes.
"""
