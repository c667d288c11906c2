SELECT {schema}.stream_reset($1, $2, $3)
