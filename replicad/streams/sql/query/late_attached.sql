-- The rows of one table, without its children, at or below a position, that were there or were written when it was attached. $1
-- bigint: the position at the last look: all rows up to there are older. $2 bigint: the position now. $3 integer: rows to count at
-- most, from the lower end. At most two rows: `fresh` are those that were written in the transaction that attached the table (that
-- wrote pg_inherits), or later, up to $1; of those in between the audit counts what was sent. The others were written before.
SELECT found.fresh, count(*) AS rows, min(found.id) AS first, max(found.id) AS last
FROM (
    SELECT t.{id}::bigint AS id, age(t.xmin) <= it.age AS fresh
    FROM ONLY {table} AS t
    CROSS JOIN (SELECT min(age(i.xmin)) AS age FROM pg_inherits AS i WHERE i.inhrelid = (
        SELECT one.tableoid FROM ONLY {table} AS one LIMIT 1)) AS it
    WHERE t.{id} <= $2::bigint AND (t.{id} <= $1::bigint OR age(t.xmin) > it.age)
    ORDER BY t.{id} LIMIT $3
) AS found
GROUP BY found.fresh
