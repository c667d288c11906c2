SELECT instance, token, acked_at FROM {schema}.stream_acks($1)
