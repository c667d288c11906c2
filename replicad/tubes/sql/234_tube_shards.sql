-- tube_shards_note(tube, shards): remembers shards of which pods leave the tube (NULL: none). Waits for no other
-- transaction. Writes tube_shard.
CREATE OR REPLACE FUNCTION tube_shards_note(tube text, shards integer[]) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    INSERT INTO tube_shard (tube, shard)
        SELECT $1, s FROM unnest($2) AS s
        WHERE NOT EXISTS (SELECT FROM tube_shard k WHERE k.tube = $1 AND k.shard = s)
$$;

-- tube_shards_past(a): the shards of which a downstream may hold rows of this table, if it has a routing; else none.
-- These are the shards of the table's last backfill, and all of the tube but those that are the constant shard of
-- another table. Writes nothing.
CREATE OR REPLACE FUNCTION tube_shards_past(a tube_attachment) RETURNS integer[]
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT coalesce(array_agg(past.shard ORDER BY past.shard), '{}')
    FROM (
        SELECT unnest(b.shards) AS shard FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl
        UNION
        SELECT k.shard FROM tube_shard k WHERE k.tube = a.tube AND NOT EXISTS (
            SELECT FROM tube_attachment x
            WHERE x.tube = a.tube AND x.root <> a.root AND x.routing IS NULL AND x.shard = k.shard)
    ) AS past
    WHERE a.routing IS NOT NULL
$$;
