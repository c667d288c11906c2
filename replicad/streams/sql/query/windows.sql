-- What a table has at one moment, for the audit to compare: counts of rows (audit_...), ids and files (late_...).

-- name: audit_counts
-- How many rows of (after, upto] there are in each of the parts that some ids divide it into: part n has the ids above the
-- n-th of them and up to the next one. $1 bigint: after. $2 bigint: upto. $3 bigint[]: these ids, each with 1 added. $4 integer: rows to
-- read at most, from the lower end. {apart}: the start of a condition that leaves out rows, or nothing.
SELECT found.part, count(*) AS rows
FROM (
    SELECT pg_catalog.width_bucket(t.{id}::bigint, $3::bigint[]) AS part
    FROM {table} AS t WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint{apart} ORDER BY t.{id} LIMIT $4
) AS found
GROUP BY found.part

-- name: audit_range
-- How many rows of (after, upto] there are, and the highest of their ids. $1 bigint: after. $2 bigint: upto. $3 integer: rows to count,
-- from the lower end, and those beyond that have the last id too. {apart}: the start of a condition that leaves out rows, or nothing.
-- `since`: transactions with lower numbers have ended for this snapshot.
SELECT count(*) AS rows, max(found.id) AS last, pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS since
FROM (
    SELECT t.{id}::bigint AS id FROM {table} AS t WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint{apart}
    ORDER BY t.{id} FETCH FIRST ($3) ROWS WITH TIES
) AS found

-- name: audit_lowest
-- The lowest id of a stream's table; NULL where it is empty.
SELECT min(t.{id})::bigint AS lowest FROM {table} AS t

-- name: audit_trimmed
-- Up to where the registry says that rows of the stream are gone. In the snapshot of audit_lowest. $1 integer: its number.
SELECT s.trimmed_upto FROM {schema}.stream AS s WHERE s.number = $1::integer

-- name: audit_writers
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

-- name: late_tree
-- The table of a stream with all its partitions and children, and its sequence (without a name), each with the number of its
-- file: a command that rewrites a table gives it another file. $1 bigint, $2 bigint: the oids of table and sequence. $3 text, $4 text:
-- the schema and the name of the table that is meant (or NULL): where they lead to another relation with rows, it takes the place
-- of the table. The table comes first. A temporary child is left out: only its own session sees its rows. Reads catalogs only.
WITH RECURSIVE tree (member, depth) AS (
    SELECT coalesce((
        SELECT c.oid FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE n.nspname = $3::text AND c.relname = $4::text AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
    ), $1::bigint::oid), 0
    UNION
    SELECT i.inhrelid, tree.depth + 1 FROM tree JOIN pg_inherits AS i ON i.inhparent = tree.member
)
SELECT found.oid, found.name, found.file
FROM (
    SELECT c.oid::bigint AS oid, format('%I.%I', n.nspname, c.relname) AS name, pg_relation_filenode(c.oid)::bigint AS file,
        min(tree.depth) AS depth
    FROM tree JOIN pg_class AS c ON c.oid = tree.member JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relpersistence <> 't'
    GROUP BY c.oid, n.nspname, c.relname
    UNION ALL
    SELECT $2::bigint, NULL, pg_relation_filenode($2::bigint::oid)::bigint, NULL
) AS found
ORDER BY found.depth

-- name: late_attached
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

-- name: late_ids
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
