"""The line protocol without I/O: nothing here opens a connection, sleeps, logs or reads a clock."""
