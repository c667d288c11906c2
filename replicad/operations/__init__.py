"""Commands for operators: `replicad top`."""
