"""Redis pub/sub as a second way out: one daemon of a database publishes the rows of all streams to Redis.

`link` and `address` are the connection; `book` (Postgres), `turn`, `publisher` and `hearing` the daemon's side;
`following`, `junction` and `switch` the client's side, which `open_client("redis://...")` makes. docs/transports.md has
the guarantees.
"""
