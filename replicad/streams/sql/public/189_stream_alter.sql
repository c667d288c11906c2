-- stream_alter(name, tbl, same_rows, sequence, positions): the stream goes on with another table, or with the same one under its
-- present name. Its sequence is the one that feeds the table, or the one that is given. Its table of positions is the one that
-- is given, or that of before. With the same table and sequence readers
-- notice nothing. Otherwise a generation begins: readers get all rows anew; with same_rows those up to the noted position
-- are taken to be the same, which is refused if the two tables differ in their ids. Returns notes. Raises RS001, RS002.
-- Writes stream, and what stream_fork writes; moves the guard.
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
