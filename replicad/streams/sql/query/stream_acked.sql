SELECT {schema}.stream_acked($1)
