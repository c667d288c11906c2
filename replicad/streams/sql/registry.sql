-- How streams are registered, changed and removed.

-- stream_number_next(): the number of the next stream. Numbers go up and come round, so that a lock left from a removed stream
-- does not meet a new one. Raises RS002 where there is none.
CREATE OR REPLACE FUNCTION stream_number_next() RETURNS smallint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    free smallint := (
        SELECT n FROM generate_series(1, 8191) n WHERE NOT EXISTS (SELECT FROM stream x WHERE x.number = n)
        ORDER BY n <= (SELECT coalesce(max(x.number), 0) FROM stream x), n LIMIT 1);
BEGIN
    PERFORM stream_refuse('there are 8191 streams, which is all that there can be', 'remove those that nobody reads')
        WHERE free IS NULL;
    RETURN free;
END
$$;

-- stream_add(name, tbl, id_column, instance_column, row_sql, method, positions, sequence, max_row): makes a table a stream.
-- `max_row` bounds its lines, in bytes (stream_max_row). Returns notes that are worth reading about it, if there are any.
-- Raises RS002 with the reason and the remedy, and RS007 for a bound beyond what clients take. Writes stream,
-- stream_generation, stream_writer, and for the method reservation the guard's triggers on the table.
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
    s.number := stream_number_next();
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

-- stream_remove(name): removes the stream; the table and its rows stay. Of a stream of changes the triggers are dropped, and the
-- table of changes. Raises RS001. Writes stream and the rows that refer to it; drops the guard.
CREATE OR REPLACE FUNCTION stream_remove(name text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    PERFORM stream_changes_remove(s.number);
    PERFORM stream_guard_detach(s.number);
    EXECUTE format('DROP FUNCTION IF EXISTS stream_guard_%s()', s.number);
    DELETE FROM stream x WHERE x.number = s.number;
END
$$;
COMMENT ON FUNCTION stream_remove(text) IS 'Unregisters a stream; the table stays as it is';

-- stream_max_row(name, bytes): sets the bound on the length of the stream's lines. Raises RS001, and RS007 beyond what
-- clients take. Writes stream.
CREATE OR REPLACE FUNCTION stream_max_row(name text, bytes bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    UPDATE stream x SET max_row = stream_check_max_row(bytes) WHERE x.number = s.number;
END
$$;
COMMENT ON FUNCTION stream_max_row(text, bigint) IS 'Sets the bound on the length of the lines of a stream';

-- stream_alter(name, tbl, same_rows, sequence, positions): the stream goes on with another table, or with the same one
-- under its present name. Its sequence is the sequence that feeds the table, or the given one. Its table of positions is
-- the one that is given, or that of before. With the same table and sequence readers notice nothing. Otherwise a generation
-- begins: readers get all rows anew; with same_rows the rows up to the noted position are taken to be the same, which is
-- refused if the two tables differ in their ids. Returns notes. Raises RS001, RS002. Writes stream, and the tables that
-- stream_fork writes; moves the guard.
CREATE OR REPLACE FUNCTION stream_alter(
    name text, tbl regclass, same_rows boolean = false, sequence regclass = NULL, positions regclass = NULL
) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
    old stream := s;
    noted bigint := (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
    ids text := 'SELECT format(''%%s %%s'', count(*), sum(hashint8(t.%I)::bigint)) FROM %s t WHERE t.%I <= %L';
    here text;
    there text;
BEGIN
    s.relation := tbl;
    PERFORM stream_refuse(format('stream %s has the changes of %s', name, c.source), 'to record those of another table, add another stream')
        FROM stream_changes c WHERE c.stream = s.number;
    PERFORM stream_check_table(tbl);
    s.sequence := coalesce(sequence, CASE WHEN old.fed THEN stream_sequence(tbl, s.id_column) END, old.sequence);
    s.fed := s.sequence IS NOT DISTINCT FROM stream_sequence(tbl, s.id_column);
    s.relation_named := stream_named(tbl);
    s.sequence_named := stream_named(s.sequence);
    s.positions := coalesce(positions, old.positions);
    s.positions_named := stream_named(s.positions);
    s.also_feeds := ARRAY(SELECT stream_fed_elsewhere(s.sequence, tbl));
    s.row_type := stream_check_parts(s);
    IF same_rows AND s.relation <> old.relation AND EXISTS (SELECT FROM pg_class c WHERE c.oid = old.relation) THEN
        EXECUTE format(ids, s.id_column, old.relation, s.id_column, noted) INTO there;
        EXECUTE format(ids, s.id_column, tbl, s.id_column, noted) INTO here;
        IF here <> there THEN
            PERFORM stream_refuse(format('%s and %s do not have the same ids up to %s, the noted position', tbl, old.relation,
                noted), 'leave --same-rows out: readers then get all rows of the new table');
        END IF;
    END IF;
    LOCK TABLE stream IN SHARE ROW EXCLUSIVE MODE;  -- as stream_add
    UPDATE stream x SET relation = s.relation, sequence = s.sequence, fed = s.fed, relation_named = s.relation_named,
        sequence_named = s.sequence_named, positions = s.positions, positions_named = s.positions_named, also_feeds = s.also_feeds, row_type = s.row_type
    WHERE x.number = s.number;
    IF s.relation <> old.relation OR s.sequence <> old.sequence THEN
        PERFORM stream_fork(s.number, stream_epoch(s), CASE WHEN same_rows THEN 'altered' ELSE 'table_changed' END);
        PERFORM stream_writers_discover(s);
    END IF;
    IF s.method = 'reservation' AND s.relation <> old.relation THEN
        PERFORM stream_guard_detach(s.number);
        PERFORM stream_guard_attach(s);
    END IF;
    RETURN stream_notes(s);
END
$$;
COMMENT ON FUNCTION stream_alter(text, regclass, boolean, regclass, regclass) IS 'Goes on with another table; returns notes worth reading';

-- stream_sequence_changed(name, what): tells replicad what a change of the stream's sequence has done to its ids, in the
-- transaction of that change or after it; without it daemons find out as far as they can (stream_kept_upto), and the stream
-- stops where they cannot (stream_question). `same`: every row has the id that it had, and the next id is above them, as
-- after ALTER COLUMN ... TYPE bigint of an identity column, which writes all rows anew. Readers go on then. `restarted`:
-- ids begin again. Then all of them are read from the start. Returns the id of the present generation. Raises RS001, and
-- RS002 where the sequence is below the published position. Writes the tables that stream_fork writes.
CREATE OR REPLACE FUNCTION stream_sequence_changed(name text, what text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
    noted bigint := (SELECT max(p.position) FROM stream_position p WHERE p.stream = s.number);
BEGIN
    IF what IS NULL OR what NOT IN ('same', 'restarted') THEN
        PERFORM stream_refuse_argument(format('%L is not what can have happened to a sequence', what),
            'say `same` where all rows have the ids that they had, or `restarted` where ids begin again');
    ELSIF what = 'same' AND (pg_sequence_last_value(s.sequence) >= noted) IS FALSE THEN
        PERFORM stream_refuse(format('sequence %s stands at %s, and stream %s was published up to %s: ids will come again',
            s.sequence, pg_sequence_last_value(s.sequence), s.name, noted),
            format('SELECT setval(%L, %s) first, or say `restarted`', s.sequence, noted));
    END IF;
    RETURN stream_fork(s.number, stream_epoch(s), CASE what WHEN 'same' THEN 'sequence_kept' ELSE 'ids_went_back' END);
END
$$;
COMMENT ON FUNCTION stream_sequence_changed(text, text) IS 'Says whether a changed sequence has kept its ids';
