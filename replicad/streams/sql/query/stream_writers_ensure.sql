SELECT writer, writer_number FROM {schema}.stream_writers_ensure($1, $2::text[])
