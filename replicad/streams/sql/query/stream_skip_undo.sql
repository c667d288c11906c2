SELECT {schema}.stream_skip_undo($1, $2)
