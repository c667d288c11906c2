SELECT writer FROM {schema}.stream_writers_idle($1, $2)
