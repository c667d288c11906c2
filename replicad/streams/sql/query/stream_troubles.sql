SELECT daemon, kind, name, cause, code, reason, since FROM {schema}.stream_troubles()
