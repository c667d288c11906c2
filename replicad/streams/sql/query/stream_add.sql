-- The casts keep what text and oids mean in SQL: a name that is too long is cut, and an oid may stand for its table.
SELECT {schema}.stream_add($1, $2::bigint::oid::regclass, $3::text::name, $4::text::name, $5, $6,
    $7::bigint::oid::regclass, $8::bigint::oid::regclass, $9)
