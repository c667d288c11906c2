-- tube_backfill_source(a, order_col, home): the query of shard, id and sort_key of the rows to backfill; home is the
-- shard if there is no routing. Writes nothing.
CREATE OR REPLACE FUNCTION tube_backfill_source(a tube_attachment, order_col text, home integer) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format('SELECT %s AS shard, id::bigint AS id, %I AS sort_key FROM %s AS tube_row WHERE id IS NOT NULL%s',
        coalesce(E'coalesce((\n' || a.routing || format(E'\n)::integer, %s) & 2147483647', home), home::text),
        order_col, tube_qualified(a.tbl), tube_where((tube_find(a.tube)).predicate, a.predicate))
$$;

-- tube_backfill_shards(tbl, source, path): the shards that occur in source. Writes nothing.
CREATE OR REPLACE FUNCTION tube_backfill_shards(tbl regclass, source text, path text) RETURNS integer[]
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT ARRAY(SELECT tube_as_owner(tbl, format('SELECT DISTINCT shard::text FROM (%s) AS stored', source), path)::integer)
$$;
