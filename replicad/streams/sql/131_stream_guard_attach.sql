-- stream_guard_attach(s): puts the guard of a reserved stream on its table. AFTER, because it then sees the id as it is
-- stored and leaves bulk COPY fast. Writes triggers: partitions get theirs from Postgres, heirs from here.
CREATE OR REPLACE FUNCTION stream_guard_attach(s stream) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    member regclass;
BEGIN
    PERFORM stream_guard_build(s);
    FOR member IN SELECT t FROM stream_tables(s.relation) t JOIN pg_class c ON c.oid = t
        WHERE NOT c.relispartition OR t = s.relation
    LOOP
        EXECUTE format('CREATE OR REPLACE TRIGGER replicad_guard_%s AFTER INSERT OR UPDATE OF %I ON %s FOR EACH ROW'
            ' EXECUTE FUNCTION stream_guard_%s()', s.number, s.id_column, member, s.number);
    END LOOP;
END
$$;
-- stream_guard_detach(number): drops these triggers, on whichever tables they are.
CREATE OR REPLACE FUNCTION stream_guard_detach(number integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    member regclass;
BEGIN
    FOR member IN SELECT t.tgrelid FROM pg_trigger t
        WHERE t.tgname = 'replicad_guard_' || number AND t.tgparentid = 0
            AND t.tgfoid = to_regprocedure(format('stream_guard_%s()', number))
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', 'replicad_guard_' || number, member);
    END LOOP;
END
$$;
