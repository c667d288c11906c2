"""`replicad tail` and `replicad ping`: a client at the command line."""
