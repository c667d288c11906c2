"""Tubes in the daemon: answers to clients' requests, and waits for new pods."""
