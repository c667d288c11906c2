SELECT {schema}.stream_note($1, $2, $3::bigint::oid, $4::bigint::oid, $5, $6::integer[], $7::bigint[])
