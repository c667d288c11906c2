"""`replicad doctor`: the problems of an installation, and their remedies. Each check is a declared object."""
