"""Streams in the daemon: which are served (`publisher`), how rows reach readers (`feed`, `lane`), who reads them."""
