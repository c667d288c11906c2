-- The streams whose entry in the registry may have changed since it was loaded (registry_view.py). A mark is a hash of the
-- versions (xmin, ctid) of the rows that describe a stream: another mark means that one of them was written.
-- $1 text[]: the streams that are known. $2 bigint[]: their marks of our own tables and of the server. $3 bigint[]: their
-- marks of the catalogs (NULL: not known). $4 bigint[]: their noted positions. $5 text[]: those whose catalogs are looked at.
-- `own` is NULL for a stream that was removed.
WITH home AS MATERIALIZED (
    SELECT {schema}.stream_incarnation() AS incarnation
), parts AS MATERIALIZED (
    SELECT part.stream, bit_xor(hashtextextended(part.version, 0)) AS version
    FROM (
        SELECT w.stream, concat_ws(' ', 'w', w.xmin, w.ctid) AS version FROM {schema}.stream_writer w
        UNION ALL
        SELECT k.stream, concat_ws(' ', 'k', k.xmin, k.ctid) FROM {schema}.stream_skip k
    ) AS part
    GROUP BY part.stream
), marks AS (
    SELECT s.name, p.position AS noted,
        hashtextextended(concat_ws(' ', home.incarnation, s.xmin, s.ctid, parts.version, g.number), 0) AS own,
        CASE WHEN s.name = ANY ($5::text[]) THEN (
            SELECT coalesce(hashtextextended(string_agg(version.text, ' '), 0), 0)
            FROM (
                SELECT concat_ws(' ', 'c', c.xmin, c.ctid, n.xmin, n.ctid) AS text
                FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE c.oid IN (s.relation, s.sequence, s.positions)
                UNION ALL
                SELECT concat_ws(' ', 'q', q.xmin, q.ctid) FROM pg_sequence q WHERE q.seqrelid = s.sequence
                UNION ALL
                SELECT concat_ws(' ', 'a', a.xmin, a.ctid) FROM pg_attribute a
                WHERE a.attrelid = s.relation AND a.attname IN (s.id_column, s.instance_column)
                UNION ALL
                SELECT concat_ws(' ', 'i', i.xmin, i.ctid) FROM pg_index i WHERE i.indrelid = s.relation
                UNION ALL
                SELECT concat_ws(' ', 'h', h.xmin, h.ctid) FROM pg_inherits h WHERE h.inhparent = s.relation
                UNION ALL
                SELECT concat_ws(' ', 'b', {schema}.stream_bearer(s.relation_named)::oid,
                    {schema}.stream_bearer(s.sequence_named)::oid)
                UNION ALL
                SELECT concat_ws(' ', 'd', d.objid) FROM pg_depend d
                WHERE d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = s.sequence
                UNION ALL
                SELECT concat_ws(' ', 'f', f.oid, f.xmin) FROM pg_attrdef f WHERE f.adrelid = s.relation
                ORDER BY 1
            ) AS version
        ) END AS catalogs
    FROM home CROSS JOIN {schema}.stream s
    LEFT JOIN parts ON parts.stream = s.number
    LEFT JOIN {schema}.stream_position p ON p.stream = s.number AND p.writer = 0
    LEFT JOIN LATERAL (
        SELECT x.number FROM {schema}.stream_generation x WHERE x.stream = s.number ORDER BY x.number DESC LIMIT 1
    ) AS g ON TRUE
)
SELECT name, m.own, m.catalogs, m.noted
FROM marks m FULL JOIN unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[]) AS known (name, own, catalogs, noted)
    USING (name)
WHERE m.own IS DISTINCT FROM known.own OR m.noted IS DISTINCT FROM known.noted
    OR (m.catalogs IS NOT NULL AND m.catalogs IS DISTINCT FROM known.catalogs)
