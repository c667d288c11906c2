-- Registered streams, all of them or those that are named, with what serving them needs. Each of `readers` is what
-- stream_reader(stream_runs_as()) gives, once for all streams.
WITH home (schema) AS (
    SELECT c.relnamespace FROM pg_class c WHERE c.oid = (SELECT x.tableoid FROM {schema}.stream x LIMIT 1)
), missing (name) AS (
    SELECT format('%I.stream_reader_missing', n.nspname) FROM home JOIN pg_namespace n ON n.oid = home.schema
), readers (owner, name) AS MATERIALIZED (
    SELECT r.oid, coalesce((
        SELECT format('%I.%I', n.nspname, p.proname)
        FROM home JOIN pg_namespace n ON n.oid = home.schema JOIN pg_proc p ON p.pronamespace = n.oid
        WHERE p.proowner = r.oid AND p.proname ~ '^reader_1_[0-9a-f]{{32}}$' AND has_function_privilege(p.oid, 'EXECUTE')
        LIMIT 1), missing.name)
    FROM pg_roles r, missing
    WHERE NOT r.rolsuper AND r.rolname <> current_user AND r.oid IN (
        SELECT c.relowner FROM {schema}.stream s JOIN pg_class c ON c.oid IN (s.relation, s.sequence, s.positions))
)
SELECT s.number::integer AS number,
    s.name,
    CASE WHEN tc.oid IS NOT NULL THEN format('%I.%I', tn.nspname, tc.relname) END AS table,
    s.relation::oid::bigint AS table_oid,
    s.id_column::text AS id_column,
    s.instance_column::text AS instance_column,
    s.row_sql AS row,
    s.row_type,
    s.method,
    CASE WHEN qc.oid IS NOT NULL THEN format('%I.%I', qn.nspname, qc.relname) END AS sequence,
    s.sequence::oid::bigint AS sequence_oid,
    CASE WHEN pc.oid IS NOT NULL THEN format('%I.%I', pn.nspname, pc.relname) END AS positions_table,
    s.positions::oid::bigint AS positions_oid,
    (SELECT quote_ident(n.nspname) FROM home JOIN pg_namespace n ON n.oid = home.schema) AS home,
    s.relation_named,
    s.sequence_named,
    s.positions_named,
    s.fed,
    s.also_feeds <> '{{}}' AS shares_sequence,
    -- one row per id, by a unique index that covers all partitions; an index of a parent does not cover its heirs
    EXISTS (
        SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
        WHERE i.indrelid = s.relation AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indnkeyatts = 1
            AND a.attname = s.id_column
            AND (tc.relkind = 'p' OR NOT EXISTS (SELECT FROM pg_inherits h WHERE h.inhparent = s.relation))
    ) AS unique_ids,
    coalesce(tc.relkind = 'r' AND has_table_privilege(tc.oid, 'SELECT'), false) AS plain,
    tr.name AS reader,
    qr.name AS sequence_reader,
    pr.name AS positions_reader,
    coalesce(g.id, '') AS epoch,
    coalesce({schema}.stream_continues(s, g), false) AS continues,
    g.file::bigint AS sequence_file,
    (SELECT p.position FROM {schema}.stream_position p WHERE p.stream = s.number AND p.writer = 0) AS noted,
    {schema}.stream_fault(s) AS fault,
    nullif(concat_ws('. ', {schema}.stream_denied(s), CASE missing.name
        WHEN tr.name THEN {schema}.stream_reader_wanted(s.relation)
        WHEN qr.name THEN {schema}.stream_reader_wanted(s.sequence)
        WHEN pr.name THEN {schema}.stream_reader_wanted(s.positions) END), '') AS denied,
    -- where the proofs of reservations can be checked; NULL: this role may not, so every lock counts
    (SELECT format('%I.%I', kn.nspname, kc.relname)
        FROM home JOIN pg_namespace kn ON kn.oid = home.schema JOIN pg_class kc ON kc.relnamespace = kn.oid
        WHERE kc.relname = 'stream_reservation_key' AND has_table_privilege(kc.oid, 'SELECT')) AS proof_key,
    s.trimmed_upto,
    s.max_row,
    ARRAY(SELECT k.id FROM {schema}.stream_skip k WHERE k.stream = s.number ORDER BY k.id)::bigint[] AS skipped,
    s.created_at,
    ARRAY(SELECT w.name FROM {schema}.stream_writer w WHERE w.stream = s.number AND w.retired_at IS NULL
        ORDER BY w.number) AS writer_names,
    ARRAY(SELECT w.number FROM {schema}.stream_writer w WHERE w.stream = s.number AND w.retired_at IS NULL
        ORDER BY w.number) AS writer_numbers
FROM {schema}.stream s
LEFT JOIN LATERAL {schema}.stream_generation_now(s) g ON true
LEFT JOIN pg_class tc ON tc.oid = s.relation
LEFT JOIN pg_namespace tn ON tn.oid = tc.relnamespace
LEFT JOIN pg_class qc ON qc.oid = s.sequence
LEFT JOIN pg_namespace qn ON qn.oid = qc.relnamespace
LEFT JOIN pg_class pc ON pc.oid = s.positions
LEFT JOIN pg_namespace pn ON pn.oid = pc.relnamespace
LEFT JOIN readers tr ON tr.owner = tc.relowner
LEFT JOIN readers qr ON qr.owner = qc.relowner
LEFT JOIN readers pr ON pr.owner = pc.relowner
CROSS JOIN missing
WHERE $1::text[] IS NULL OR s.name = ANY ($1)
ORDER BY s.name
