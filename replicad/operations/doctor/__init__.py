"""`replicad doctor`: what is wrong with an installation, and what to type. Each check is a declared object."""
