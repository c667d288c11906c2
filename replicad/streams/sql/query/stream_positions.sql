SELECT writer, position FROM {schema}.stream_positions($1)
