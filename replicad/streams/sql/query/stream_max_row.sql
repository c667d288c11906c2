SELECT {schema}.stream_max_row($1, $2)
