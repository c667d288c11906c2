-- How many rows of (after, upto] there are, and the highest of their ids. $1 bigint: after. $2 bigint: upto. $3 integer: rows to count,
-- from the lower end, and those beyond that have the last id too. {apart}: the start of a condition that leaves out rows, or nothing.
-- `since`: transactions with lower numbers have ended for this snapshot.
SELECT count(*) AS rows, max(found.id) AS last, pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS since
FROM (
    SELECT t.{id}::bigint AS id FROM {table} AS t WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint{apart}
    ORDER BY t.{id} FETCH FIRST ($3) ROWS WITH TIES
) AS found
