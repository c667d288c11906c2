"""What the commands of all features share: options, the connection to a database, output, and messages of failures."""
