SELECT {schema}.stream_remove($1)
