-- How many rows there are in the range of their writer. $1 bigint, $2 bigint: all ranges lie in ($1, $2]. $3 text[], $4 bigint[],
-- $5 bigint[]: writers, and the range of each. $6 bigint, $7 bigint: the range of all others. $8 integer: rows to count at most.
-- {apart}: the start of a condition that leaves out rows, or nothing.
SELECT count(*) AS rows
FROM (
    SELECT FROM {table} AS t
    LEFT JOIN unnest($3::text[], $4::bigint[], $5::bigint[]) AS w (name, after, upto)
        ON w.name = {schema}.stream_instance(t.{instance}::text COLLATE "C")
    WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint{apart}
        AND t.{id} > coalesce(w.after, $6::bigint) AND t.{id} <= coalesce(w.upto, $7::bigint)
    LIMIT $8
) AS found
