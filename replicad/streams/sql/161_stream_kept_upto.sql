-- stream_files(tbl): the files of a table and all its partitions and heirs, as `oid:file` with commas.
CREATE OR REPLACE FUNCTION stream_files(tbl regclass) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT string_agg(format('%s:%s', t::oid, pg_relation_filenode(t)), ',' ORDER BY t::oid)
    FROM stream_tables(tbl) t WHERE pg_relation_filenode(t) IS NOT NULL
$$;
COMMENT ON FUNCTION stream_files(regclass) IS 'The files of a table and its partitions';
-- stream_kept_upto(s, g, went_back): up to where the rows of generation `g` are the same for certain, though its sequence was
-- altered (AS bigint, MAXVALUE, CACHE, OWNED BY ...) or, `went_back`, set to a lower value; NULL where nothing is certain.
--  - The tables that are left have the files that they had when a position was noted last (stream_note). TRUNCATE ... RESTART
--    IDENTITY replaces them.
--  - Below the lowest row that was written since that note (whose transaction is newer), and at or below the last value, no id
--    was given out again: a sequence that was lower leaves rows in the gaps. Where it is known to have gone back, no transaction
--    may be under way that can still leave one. An UPDATE makes a row a newer one, so less is shared then.
-- ALTER SEQUENCE waits for all who have taken an id in their transactions, so all ids of before are finished.
-- Reads the rows up to the note, once; without an answer within statement_timeout nothing is certain.
CREATE OR REPLACE FUNCTION stream_kept_upto(s stream, g stream_generation, went_back boolean) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    last bigint := pg_sequence_last_value(s.sequence);
    noted bigint;
    since xid;
    present text[] := string_to_array(stream_files(s.relation), ',');
    known text[] := string_to_array(g.table_files, ',');
    lowest bigint;
BEGIN
    SELECT p.position, p.xmin INTO noted, since FROM stream_position p WHERE p.stream = s.number AND p.writer = 0;
    IF s.method = 'positions_table' OR g.sequence IS DISTINCT FROM s.sequence::oid OR g.relation IS DISTINCT FROM s.relation::oid
            OR last IS NULL OR noted IS NULL OR (known && present) IS NOT TRUE
            OR EXISTS (SELECT FROM unnest(present) f WHERE f <> ALL (known)
                AND split_part(f, ':', 1) IN (SELECT split_part(k, ':', 1) FROM unnest(known) k))
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
COMMENT ON FUNCTION stream_kept_upto(stream, stream_generation, boolean)
    IS 'Up to where rows are the same after a change of the sequence';
