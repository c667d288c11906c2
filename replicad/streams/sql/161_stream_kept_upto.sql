-- stream_files(tbl): the files of a table and all its partitions and heirs, as `oid:file` with commas.
CREATE OR REPLACE FUNCTION stream_files(tbl regclass) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT string_agg(format('%s:%s', t::oid, pg_relation_filenode(t)), ',' ORDER BY t::oid)
    FROM stream_tables(tbl) t WHERE pg_relation_filenode(t) IS NOT NULL
$$;
-- stream_rewritten(s, g): whether a table that is left of the stream has another file than when a position was noted last in
-- generation `g` (stream_note), or none is left. TRUNCATE ... RESTART IDENTITY replaces the files, and so do commands that write
-- each row anew.
CREATE OR REPLACE FUNCTION stream_rewritten(s stream, g stream_generation) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    present text[] := string_to_array(stream_files(s.relation), ',');
    known text[] := string_to_array(g.table_files, ',');
BEGIN
    RETURN (known && present) IS NOT TRUE OR EXISTS (SELECT FROM unnest(present) f WHERE f <> ALL (known)
        AND split_part(f, ':', 1) IN (SELECT split_part(k, ':', 1) FROM unnest(known) k));
END
$$;
-- stream_question(s, g, noted, since): what a user must say before the stream goes on from generation `g`; NULLs where nothing
-- has to be asked. `noted`: the position that was noted last; `since`: the transaction that did it.
-- The sequence and the table have other files, and the next id is above the note. ALTER COLUMN ... TYPE does that: then each row has
-- the id that it had. TRUNCATE ... RESTART IDENTITY with other rows under the same ids does it, too. Nothing that is left tells the
-- two apart, equal ids least of all, where the id column or the definition of the sequence was altered since the note, or where
-- the table has another TOAST table, as after SET UNLOGGED and SET LOGGED. Where nothing of that is so, it was a TRUNCATE; where
-- the table is empty, or the next id is not above the note, nothing is lost by beginning again.
CREATE OR REPLACE FUNCTION stream_question(
    s stream, g stream_generation, noted bigint, since xid, OUT problem text, OUT remedy text
) LANGUAGE plpgsql STABLE AS $$
DECLARE
    command text := format('replicad streams alter %s --sequence-changed ', stream_shell(s.name));
BEGIN
    IF g.file IS NOT DISTINCT FROM pg_relation_filenode(s.sequence) OR noted IS NULL OR s.method = 'positions_table'
            OR g.sequence IS DISTINCT FROM s.sequence::oid OR g.relation IS DISTINCT FROM s.relation::oid
            OR (CASE WHEN has_sequence_privilege(s.sequence, 'USAGE, SELECT')
                THEN (pg_sequence_last_value(s.sequence) >= noted) IS NOT TRUE ELSE false END)
            OR NOT EXISTS (
                SELECT FROM pg_sequence q WHERE q.seqrelid = s.sequence AND age(q.xmin) < age(since)
                UNION ALL
                SELECT FROM pg_attribute a
                WHERE a.attrelid = s.relation AND a.attname = s.id_column AND age(a.xmin) < age(since)
                UNION ALL
                SELECT FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.reltoastrelid AND a.attnum = 1
                WHERE c.oid::text IN (SELECT split_part(k, ':', 1) FROM unnest(string_to_array(g.table_files, ',')) k)
                    AND age(a.xmin) < age(since))
            OR (SELECT sum(pg_relation_size(t)) FROM stream_tables(s.relation) t) = 0
            OR NOT stream_rewritten(s, g) THEN
        RETURN;
    END IF;
    problem := format('%s and sequence %s were written anew, as by ALTER COLUMN %I TYPE or SET LOGGED, and nothing shows whether '
        'the rows up to %s, the noted position, are the same', s.relation, s.sequence, s.id_column, noted);
    remedy := format('if every row has the id that it had, run: %ssame; if ids began again (TRUNCATE ... RESTART IDENTITY), so that '
        'readers need all rows anew, run: %srestarted', command, command);
END
$$;
-- stream_question_of(s): stream_question for the present generation and note.
CREATE OR REPLACE FUNCTION stream_question_of(s stream, OUT problem text, OUT remedy text)
LANGUAGE sql STABLE AS $$
    SELECT q.problem, q.remedy
    FROM (SELECT) one LEFT JOIN stream_position p ON p.stream = s.number AND p.writer = 0
    CROSS JOIN LATERAL stream_question(s, stream_generation_now(s), p.position, p.xmin) q
$$;
-- stream_kept_upto(s, g, went_back): up to where the rows of generation `g` are the same for certain, though its sequence was
-- altered (AS bigint, MAXVALUE, CACHE, OWNED BY ...) or, `went_back`, set to a lower value; NULL where nothing is certain.
--  - The tables that are left have the files that they had when a position was noted last (stream_rewritten).
--  - Below the lowest row that was written since that note (whose transaction is newer), and at or below the last value, no id
--    was given out again: a sequence that was lower leaves rows in the gaps. Where it is known to have gone back, no transaction
--    may be under way that can still leave one. An UPDATE makes a row a newer one, so less is shared then.
-- ALTER SEQUENCE waits for all who have taken an id in their transactions, so all ids of before are finished.
-- Reads the rows up to the note, once; without an answer within statement_timeout nothing is certain. Raises RS002 where the
-- role may not read the sequence: that is no change of it.
CREATE OR REPLACE FUNCTION stream_kept_upto(s stream, g stream_generation, went_back boolean) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    last bigint;
    noted bigint;
    since xid;
    lowest bigint;
BEGIN
    IF NOT has_sequence_privilege(s.sequence, 'SELECT') THEN
        PERFORM stream_refuse(format('sequence %s may not be read, so nothing is known of the ids that it gives out', s.sequence),
            format('run: GRANT SELECT ON SEQUENCE %s TO %I', s.sequence, current_user));
    END IF;
    last := pg_sequence_last_value(s.sequence);
    SELECT p.position, p.xmin INTO noted, since FROM stream_position p WHERE p.stream = s.number AND p.writer = 0;
    IF s.method = 'positions_table' OR g.sequence IS DISTINCT FROM s.sequence::oid OR g.relation IS DISTINCT FROM s.relation::oid
            OR last IS NULL OR noted IS NULL OR stream_rewritten(s, g)
            OR (went_back AND (stream_writer_holder(s, NULL)).holder IS NOT NULL) THEN
        RETURN NULL;
    END IF;
    SELECT x INTO lowest FROM stream_as_owner(s.relation, format(
        'SELECT min(t.%I)::text FROM %s AS t WHERE t.%I <= %s AND age(t.xmin) < age(%L::xid)',
        s.id_column, stream_qualified(s.relation), s.id_column, noted, since)) x;
    RETURN least(noted, last, lowest - 1);
EXCEPTION WHEN query_canceled THEN
    RETURN NULL;
END
$$;
