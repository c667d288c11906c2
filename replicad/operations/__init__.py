"""What an operator looks at: `replicad top`."""
