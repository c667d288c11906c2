"""The daemon: what it publishes, and whom it serves."""
