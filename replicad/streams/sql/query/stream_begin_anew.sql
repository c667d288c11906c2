SELECT {schema}.stream_begin_anew($1, $2)
