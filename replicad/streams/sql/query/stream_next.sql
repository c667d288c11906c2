SELECT {schema}.stream_next($1)
