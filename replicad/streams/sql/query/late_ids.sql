-- Which ids of (after, upto] there are, ascending, and how many rows each has (NULL: one each). $1 bigint: after. $2 bigint: upto.
-- $3 integer: rows to read at most, from the upper end; the lowest id may be cut then. {apart}: the start of a condition
-- that leaves out tables of the tree, or nothing. One row.
SELECT
    coalesce(array_agg(found.id ORDER BY found.id), '{{}}'::bigint[]) AS ids,
    CASE WHEN sum(found.rows) > count(*) THEN array_agg(found.rows ORDER BY found.id) END AS counts,
    coalesce(sum(found.rows), 0)::bigint AS rows
FROM (
    SELECT one.id, count(*) AS rows
    FROM (
        SELECT t.{id}::bigint AS id FROM {table} AS t WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint{apart} ORDER BY t.{id} DESC LIMIT $3
    ) AS one
    GROUP BY one.id
) AS found
