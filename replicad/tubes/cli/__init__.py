"""`replicad tubes`: make tubes, attach tables, fill tubes and show what is in them."""
