"""`replicad tubes`: create tubes, attach tables, fill tubes and show their pods."""
