"""Postgres: the bridge to the driver, the embedded server, the installer of SQL parts, and positions.

Nothing here knows clients, commands on the wire or Spark.
"""
