-- The positions that the writers of one stream publish themselves ({table}: quoted name of the table).
-- $1 text: the stream's name in that table. inserted: the WAL that makes the rows durable ends at or before it.
SELECT
    p.instance_name::text AS writer,
    p.stream_id::bigint AS position,
    (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint AS inserted,
    (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint AS flushed
FROM {table} AS p
WHERE p.stream_name = $1::text
