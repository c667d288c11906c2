"""The Postgres floor: the bridge to the driver, the embedded server, the schema, and how far it is safe to read.

Nothing in here knows of sockets to clients, of commands on the wire or of Spark.
"""
