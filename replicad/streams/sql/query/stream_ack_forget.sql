SELECT {schema}.stream_ack_forget($1, $2)
