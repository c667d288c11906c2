SELECT {schema}.stream_skip_id($1, $2, $3)
