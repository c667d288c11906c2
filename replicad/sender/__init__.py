"""The federation sender: facts and updates out of a stream to many HTTP destinations, each in order, none held up.

`destination` decides (no I/O), `store` remembers (Postgres), `transport` delivers (HTTP), `sender` puts them together.
"""
