-- stream_guard_attach(s): puts the guard on the table: an inserted id must be above the bound that its transaction holds.
-- The condition costs no call of a procedure for rows in order. AFTER, because it then sees the id as stored and leaves
-- bulk COPY fast. Writes triggers on the table; partitions get theirs from Postgres, heirs from here.
CREATE OR REPLACE FUNCTION stream_guard_attach(s stream) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    held text := format('current_setting(%L, true)', s.setting);
    uncovered text := format('NOT coalesce(split_part(%s, '':'', 1) = pg_current_xact_id()::text'
        ' AND NEW.%I > nullif(split_part(%s, '':'', 2), '''')::bigint, false)', held, s.id_column, held);
    call text := format('EXECUTE FUNCTION stream_guard(%s, %L, %L)', s.number, s.id_column, s.setting);
    member regclass;
BEGIN
    FOR member IN SELECT t FROM stream_tables(s.relation) t JOIN pg_class c ON c.oid = t WHERE NOT c.relispartition
        OR t = s.relation
    LOOP
        EXECUTE format('CREATE TRIGGER replicad_guard_%s_insert AFTER INSERT ON %s FOR EACH ROW WHEN (%s) %s',
            s.number, member, uncovered, call);
        EXECUTE format('CREATE TRIGGER replicad_guard_%s_update AFTER UPDATE ON %s FOR EACH ROW'
            ' WHEN (OLD.%I IS DISTINCT FROM NEW.%I AND %s) %s',
            s.number, member, s.id_column, s.id_column, uncovered, call);
    END LOOP;
END
$$;
COMMENT ON FUNCTION stream_guard_attach(stream) IS 'Creates the triggers that refuse ids which outlived their reservation';
