SELECT number, writer AS name, position, created_at, retired_at FROM {schema}.stream_writers($1)
