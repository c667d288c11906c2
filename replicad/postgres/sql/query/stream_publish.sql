SELECT {schema}.stream_publish($1, $2, $3, $4::integer[], $5::bigint[])
