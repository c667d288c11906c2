SELECT {schema}.stream_trouble_write($1, $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::float8[])
