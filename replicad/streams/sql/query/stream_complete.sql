SELECT {schema}.stream_complete(($1)::integer, $2, $3)
