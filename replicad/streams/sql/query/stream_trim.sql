SELECT {schema}.stream_trim($1, $2, $3)
