-- The backfills that are scheduled or running; the names of tables are as those of tube_list.
SELECT b.tube, coalesce(to_regclass(b.tbl)::text, b.tbl) AS tbl, b.order_col, b.state, b.ids, b.approx_ids
FROM {schema}.tube_backfills() AS b
