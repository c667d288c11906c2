"""Who is online: workers report their users, daemons write one stream of it.

`reporter` is the worker's side; `roster`, `user_ips` and `service` are the daemon's; `book` reads and writes Postgres.
"""
