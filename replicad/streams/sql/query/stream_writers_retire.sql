SELECT {schema}.stream_writers_retire($1, $2::text[], $3::float8)
