-- The oldest token that nothing is missing after: what trim left, else just below the first id that there can be.
-- RS005 where the name leads to another table.
SELECT coalesce(s.trimmed_upto, least(
    (SELECT min(t.{id}) FROM {table} AS t WHERE {same}) - 1,
    (SELECT q.seqstart - 1 FROM pg_sequence q WHERE q.seqrelid = s.sequence)))::bigint
FROM {schema}.stream s WHERE s.number = $1
