"""Downstreams: where the pipeline writes to. `base` says what one must do; the other files are one downstream each."""
