-- stream_add(name, tbl, id_column, instance_column, row_sql, method, positions, sequence, max_row): makes a table a stream.
-- `max_row` bounds its lines, in bytes (stream_max_row). Returns what is worth knowing about it, nothing where all is plain.
-- Raises RS002 with the reason and the remedy, and RS007 for a bound beyond what clients take.
-- Writes stream, stream_generation, stream_writer, and for the method reservation the guard's triggers on the table.
CREATE OR REPLACE FUNCTION stream_add(
    name text,
    tbl regclass,
    id_column name,
    instance_column name = NULL,
    row_sql text = NULL,
    method text = 'lock_watch',
    positions regclass = NULL,
    sequence regclass = NULL,
    max_row bigint = 67108864
) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    s stream;
BEGIN
    LOCK TABLE stream IN SHARE ROW EXCLUSIVE MODE;  -- names and numbers are given one after another
    s.name := name;
    s.relation := tbl;
    s.id_column := id_column;
    s.instance_column := instance_column;
    s.row_sql := row_sql;
    s.method := method;
    s.sequence := coalesce(sequence, stream_sequence(tbl, id_column));
    s.positions := positions;
    s.setting := 'replicad.held_' || left(md5(gen_random_uuid()::text), 12);
    s.max_row := stream_check_max_row(max_row);
    s.fed := s.sequence IS NOT DISTINCT FROM stream_sequence(tbl, id_column);
    s.relation_named := stream_named(tbl);
    s.sequence_named := stream_named(s.sequence);
    s.positions_named := stream_named(positions);
    s.also_feeds := ARRAY(SELECT stream_fed_elsewhere(s.sequence, tbl));
    s.parted := '{}';
    s.created_at := clock_timestamp();
    s.row_type := stream_check(s);
    -- Numbers go up and come round, so that a lock left from a removed stream does not meet a new one.
    s.number := (
        SELECT n FROM generate_series(1, 8191) n WHERE NOT EXISTS (SELECT FROM stream x WHERE x.number = n)
        ORDER BY n <= (SELECT coalesce(max(x.number), 0) FROM stream x), n LIMIT 1);
    PERFORM stream_refuse('there are 8191 streams, which is all that there can be', 'remove those that nobody reads')
        WHERE s.number IS NULL;
    INSERT INTO stream SELECT s.*;
    PERFORM stream_generation_add(s, stream_floor(s.sequence), '{}', '{}', 'added');
    PERFORM stream_writers_discover(s);
    IF method = 'reservation' THEN
        PERFORM stream_guard_attach(s);
    END IF;
    RETURN stream_notes(s);
END
$$;
COMMENT ON FUNCTION stream_add(text, regclass, name, name, text, text, regclass, regclass, bigint)
    IS 'Makes a table a stream; returns notes worth reading';
