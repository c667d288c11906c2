-- tube_trigger_ensure(tube, predicate, routing, path, tbl): creates the trigger function for attachments with their own
-- predicate and routing (NULL: none; their names are looked up in path) and returns its quoted name. Attachments with
-- the same predicate, routing and path share one function; those without any use {tube}_trigger. Writes that function.
--
-- The function runs with its owner's rights, so that users who write to the table need no rights on the tube. It belongs to
-- the owner of tbl, whose code predicate, routing and the type of id may run, and who gets the right to insert pods (which
-- {tube}_touch gives everybody); without tbl, and where tube_runs_as() says so, to us. It refers to replicad's objects with
-- their schema; its search_path is that of the expressions.
CREATE OR REPLACE FUNCTION tube_trigger_ensure(
    tube text, predicate text, routing text, path name[], tbl regclass = NULL
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_find(tube);
    owner oid := tube_runs_as(tbl);
    own boolean := predicate IS NOT NULL OR routing IS NOT NULL OR owner IS NOT NULL;
    hash text := left(md5(concat_ws(E'\n', coalesce(predicate, '-'), coalesce(routing, '-'), path::text,
        pg_get_userbyid(owner))), 12);
    name text := tube_object_name(tube, CASE WHEN own THEN '_trigger_' || hash ELSE '_trigger' END);
    body text := tube_trigger_body(tube, tube_where(t.predicate, predicate), routing);
    setting text := tube_path_text(CASE WHEN own THEN t.path || path ELSE t.path END);
BEGIN
    IF NOT EXISTS (SELECT FROM pg_proc p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = name
            AND p.prosrc = body AND p.proconfig = ARRAY['search_path=' || setting] AND p.prosecdef
            AND p.proowner = coalesce(owner, p.proowner)
            AND obj_description(p.oid, 'pg_proc') = 'replicad: touches tube ' || tube) THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %I() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER'
            ' SET search_path = %s AS %L', name, setting, body);
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %I() FROM PUBLIC', name);
        EXECUTE format('COMMENT ON FUNCTION %I() IS %L', name, 'replicad: touches tube ' || tube);
        IF NOT own AND t.predicate IS NULL THEN  -- nobody's code is in it
            PERFORM tube_belong(format('FUNCTION %I()', name));
        ELSIF owner IS NOT NULL THEN
            PERFORM tube_give(format('%I.%I()', current_schema(), name), owner);
            EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', current_schema(), pg_get_userbyid(owner));
            EXECUTE format('GRANT USAGE ON SEQUENCE tube_seq TO %I', pg_get_userbyid(owner));
            EXECUTE format('GRANT INSERT (op, shard, ids, payload) ON %I TO %I', tube, pg_get_userbyid(owner));
        END IF;
    END IF;
    RETURN format('%I.%I', current_schema(), name);
END
$$;

-- tube_trigger_sweep(tube): drops the tube's trigger functions that no trigger uses, except {tube}_trigger.
CREATE OR REPLACE FUNCTION tube_trigger_sweep(tube text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    stale regprocedure;
BEGIN
    FOR stale IN SELECT p.oid FROM pg_proc p
        WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
            AND p.proname <> tube_object_name(tube, '_trigger')
            AND obj_description(p.oid, 'pg_proc') = 'replicad: touches tube ' || tube
            AND NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgfoid = p.oid)
    LOOP
        EXECUTE format('DROP FUNCTION %s', stale);
    END LOOP;
END
$$;
