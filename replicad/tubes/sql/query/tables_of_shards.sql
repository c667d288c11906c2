-- The tables called $1 in schemas whose names end in a number, by that number, without partitions. For
-- `replicad tubes ... --shards`.
SELECT format('%I.%I', n.nspname, c.relname) AS tbl, n.nspname AS schema
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relname = $1
  AND c.relkind IN ('r', 'p')
  AND NOT c.relispartition
  AND n.nspname ~ '[0-9]$'
  AND n.nspname !~ '^pg_'
ORDER BY substring(n.nspname FROM '[0-9]+$')::numeric, n.nspname
