-- The casts: an oid stands for its table.
SELECT {schema}.stream_alter($1, $2::bigint::oid::regclass, $3, $4::bigint::oid::regclass, $5::bigint::oid::regclass)
