"""Shared by the commands of all features: options, the connection to a database, output, messages of failures."""
