-- The rows of one table, without its children, at or below a position that were there when it was attached. $1 bigint: the
-- position at the last look: all rows up to there are older. $2 bigint: the position now: of the rows in between, those that
-- were written before the table was attached (their transaction is older than the one that wrote pg_inherits). $3 integer:
-- rows to count at most, from the lower end. One row.
SELECT count(*) AS rows, min(found.id) AS first, max(found.id) AS last
FROM (
    SELECT t.{id}::bigint AS id
    FROM ONLY {table} AS t
    WHERE t.{id} <= $2::bigint
        AND (t.{id} <= $1::bigint
            OR age(t.xmin) > (SELECT min(age(i.xmin)) FROM pg_inherits AS i WHERE i.inhrelid = t.tableoid))
    ORDER BY t.{id} LIMIT $3
) AS found
