-- The oid of a relation named as SQL names it, NULL where there is none.
SELECT to_regclass($1)::oid::bigint
