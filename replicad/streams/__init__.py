"""Streams: which tables are streams, how far each was published, and the library for those who write to them.

Sits on the Postgres floor; knows nothing of sockets, sessions or Spark.
"""
