"""Streams in the daemon: which are served (`publisher`), how rows reach readers (`served_stream`, `lane`)."""
