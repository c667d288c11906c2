"""The sender: delivers facts and updates of streams to many HTTP destinations, each in order (docs/sender.md).

`destination` decides (no I/O), `store` keeps the state in Postgres, `transport` sends HTTP requests, `sender` combines
them. A destination that is down does not delay the others.
"""
