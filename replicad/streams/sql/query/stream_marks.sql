-- The streams whose entry in the registry may have changed since it was loaded (registry_view.py). A mark is a hash of the
-- versions (xmin, ctid) of the rows that describe a stream: another mark means that one of them was written.
-- $1 text[]: the streams that are known. $2 bigint[]: their marks of our own tables, of the server and of the memberships of roles. $3 bigint[]: their
-- marks of the catalogs (NULL: not known). $4 bigint[]: their noted positions. $5 text[]: those whose catalogs are looked at (NULL: all).
-- $6 bigint: the mark of all our tables together at the last look. While that is the same, only the streams of $5 are looked at.
-- `own` is NULL for a stream that was removed. One more row, without a name, has the present mark of our tables as `own`, and as `catalogs`
-- how many rows of the catalogs were written so far, by the statistics: a hint that comes seconds late.
WITH home AS MATERIALIZED (
    SELECT concat_ws(' ', {schema}.stream_incarnation(), (
        SELECT bit_xor(hashtextextended(concat_ws(' ', m.xmin, m.ctid), 0)) FROM pg_auth_members m
    )) AS incarnation
), part AS MATERIALIZED (
    SELECT w.stream, concat_ws(' ', 'w', w.xmin, w.ctid) AS version FROM {schema}.stream_writer w
    UNION ALL
    SELECT k.stream, concat_ws(' ', 'k', k.xmin, k.ctid) FROM {schema}.stream_skip k
), parts AS MATERIALIZED (
    SELECT part.stream, bit_xor(hashtextextended(part.version, 0)) AS version FROM part GROUP BY part.stream
), whole AS MATERIALIZED (
    SELECT bit_xor(hashtextextended(row.version, 0)) AS version
    FROM (
        SELECT home.incarnation AS version FROM home
        UNION ALL
        SELECT part.version FROM part
        UNION ALL
        SELECT concat_ws(' ', 's', s.xmin, s.ctid) FROM {schema}.stream s
        UNION ALL
        SELECT concat_ws(' ', 'p', p.xmin, p.ctid) FROM {schema}.stream_position p WHERE p.writer = 0
        UNION ALL
        SELECT concat_ws(' ', 'g', g.xmin, g.ctid) FROM {schema}.stream_generation g
    ) AS row
), marks AS (
    SELECT s.name, p.position AS noted,
        hashtextextended(concat_ws(' ', home.incarnation, s.xmin, s.ctid, parts.version, g.number), 0) AS own,
        CASE WHEN $5::text[] IS NULL OR s.name = ANY ($5) THEN (
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
                    {schema}.stream_bearer(s.sequence_named)::oid, {schema}.stream_bearer(s.positions_named)::oid)
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
    WHERE $5 IS NULL OR s.name = ANY ($5) OR (SELECT whole.version FROM whole) IS DISTINCT FROM $6::bigint
), known AS (
    SELECT k.*
    FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[]) AS k (name, own, catalogs, noted)
    WHERE $5 IS NULL OR k.name = ANY ($5) OR (SELECT whole.version FROM whole) IS DISTINCT FROM $6::bigint
)
SELECT NULL AS name, whole.version AS own, (
        SELECT sum(pg_stat_get_tuples_inserted(c) + pg_stat_get_tuples_updated(c) + pg_stat_get_tuples_deleted(c))::bigint
        FROM unnest(ARRAY[
            'pg_class', 'pg_namespace', 'pg_sequence', 'pg_attribute', 'pg_index', 'pg_inherits', 'pg_depend', 'pg_attrdef'
        ]::regclass[]) AS c
    ) AS catalogs, NULL::bigint AS noted
FROM whole
UNION ALL
SELECT name, m.own, m.catalogs, m.noted
FROM marks m FULL JOIN known USING (name)
WHERE m.own IS DISTINCT FROM known.own OR m.noted IS DISTINCT FROM known.noted
    OR (m.catalogs IS NOT NULL AND m.catalogs IS DISTINCT FROM known.catalogs)
