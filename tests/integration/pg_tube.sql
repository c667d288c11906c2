-- The functions of pg-tube 2.11 that its users and `replicad tubes pg-tube` call, written anew for tests: the names, the arguments,
-- the triggers and the names of all that it makes and drops. In the schema `old`.
CREATE SCHEMA old; SET search_path = old;
CREATE SEQUENCE tube_seq;
CREATE TABLE tube_double (tube text PRIMARY KEY, partitions integer, predicate text);
CREATE FUNCTION tube_ensure_exists(tube text, partitions integer = 1, predicate text = NULL) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO tube_double VALUES (tube, partitions, coalesce(predicate, ''));
    EXECUTE format('CREATE TABLE %I (seq bigint NOT NULL DEFAULT nextval(''tube_seq''), op char NOT NULL,'
        ' shard integer NOT NULL, ids bigint[] NOT NULL, payload jsonb, ts timestamptz NOT NULL DEFAULT clock_timestamp())', tube);
    EXECUTE format('CREATE FUNCTION %I(shard integer, ids bigint[], op char, payload jsonb = NULL, chunk_size integer = 250)'
        ' RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS ''BEGIN INSERT INTO %I (op, shard, ids, payload)'
        ' VALUES (op, shard, ids, payload); END''', tube || '_touch', tube);
    EXECUTE format('CREATE FUNCTION %I() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS ''BEGIN'
        ' PERFORM %I(TG_ARGV[0]::integer, ARRAY(SELECT DISTINCT id FROM rows %s), left(TG_OP, 1)); RETURN NULL; END''',
        tube || '_trigger', tube || '_touch', 'WHERE ' || replace(nullif(predicate, ''), '''', ''''''));
END $$;
CREATE FUNCTION _tube_predicate(tube text) RETURNS text LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT d.predicate FROM tube_double d WHERE d.tube = $1 $$;
CREATE FUNCTION tube_list(in_tbl regclass = NULL)
RETURNS TABLE (tube text, predicate text, partitions integer, tbl regclass, shard integer)
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT d.tube, d.predicate, d.partitions, g.tgrelid::regclass, g.shard FROM tube_double d LEFT JOIN (
        SELECT DISTINCT p.proname, t.tgrelid, split_part(encode(t.tgargs, 'escape'), '\000', 1)::integer AS shard
        FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid AND p.pronamespace = 'old'::regnamespace
    ) AS g ON g.proname = d.tube || '_trigger' WHERE $1 IS NULL OR g.tgrelid = $1 $$;
CREATE FUNCTION tube_double_name(tbl regclass) RETURNS text LANGUAGE sql AS $$
    SELECT format('%I.%I', n.nspname, c.relname || '_touch') FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
    WHERE c.oid = tbl $$;
CREATE FUNCTION tube_double_touch(tbl regclass) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF EXISTS (SELECT FROM tube_list(tbl)) THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %s(ids bigint[], op char = ''T'', payload jsonb = NULL, chunk_size integer = 250)'
            ' RETURNS void LANGUAGE sql AS %L', tube_double_name(tbl), (SELECT string_agg(format(
                'SELECT old.%I(%s, $1, $2, $3, $4)', l.tube || '_touch', l.shard), ';') FROM tube_list(tbl) l));
    ELSE
        EXECUTE format('DROP FUNCTION IF EXISTS %s(bigint[], char, jsonb, integer)', tube_double_name(tbl));
    END IF;
END $$;
CREATE FUNCTION tube_table_ensure_detached(in_tube text, in_tbl regclass) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    l record;
    event text;
BEGIN
    FOR l IN SELECT * FROM tube_list(in_tbl) x WHERE in_tube IS NULL OR x.tube = in_tube LOOP
        FOREACH event IN ARRAY '{insert,update,delete}'::text[] LOOP
            EXECUTE format('DROP TRIGGER IF EXISTS %I ON %s', format('%s_%s_after_%s_trigger',
                (SELECT relname FROM pg_class WHERE oid = in_tbl), l.tube, event), in_tbl);
        END LOOP;
        PERFORM tube_double_touch(in_tbl);
    END LOOP;
END $$;
CREATE FUNCTION tube_table_ensure_attached(tube text, tbl regclass, shard integer = NULL) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    event text;
BEGIN
    FOREACH event IN ARRAY '{insert,update,delete}'::text[] LOOP
        EXECUTE format('CREATE TRIGGER %I AFTER %s ON %s REFERENCING %s TABLE AS rows FOR EACH STATEMENT EXECUTE FUNCTION %I(%L)',
            format('%s_%s_after_%s_trigger', (SELECT relname FROM pg_class WHERE oid = tbl), tube, event), event, tbl,
            CASE event WHEN 'delete' THEN 'OLD' ELSE 'NEW' END, tube || '_trigger', shard);
    END LOOP;
    PERFORM tube_double_touch(tbl);
END $$;
