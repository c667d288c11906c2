"""Black-box checks of protocol.md: of any server, and of any client.

`transcript` reads the conversations of the checks, which have the notation of protocol.md. `server_checks.toml` and
`client_checks.toml` declare the checks; `against_server` and `against_client` play them. Nothing here uses the code of
the protocol that the daemon and the clients share: it must not check itself.
"""
