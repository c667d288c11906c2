"""The daemon: sessions, dispatch, supervision of services, listeners. Features are its list of services."""
