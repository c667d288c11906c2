-- Backfills that have not put all ids into their tubes: how many, and since when nothing was added.
SELECT b.tube, b.tbl::text AS table, b.ids, b.approx_ids,
    greatest(extract(epoch FROM clock_timestamp() - b.updated_at), 0)::float8 AS idle_s
FROM {schema}.tube_backfill AS b
WHERE NOT b.finished
ORDER BY b.tube, b.tbl
