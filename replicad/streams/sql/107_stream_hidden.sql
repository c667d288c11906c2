-- stream_hidden(tbl): the sentence that row security can hide rows of a table from the role that reads it, with the remedy;
-- NULL where that role sees all rows. It is the table's owner, or the asking role (stream_runs_as). All sessions of ours have
-- row_security = off: Postgres refuses to read where a policy would leave rows out, so no row is skipped in silence.
CREATE OR REPLACE FUNCTION stream_hidden(tbl regclass) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('row security can hide rows of %s from role %I, with whose rights it is read; run: ', stream_qualified(tbl),
            r.rolname)
        || CASE WHEN pg_has_role(r.oid, c.relowner, 'USAGE')
            THEN format('ALTER TABLE %s NO FORCE ROW LEVEL SECURITY; or, as a superuser: ALTER ROLE %I BYPASSRLS. If applications'
                ' connect as %2$I and its policies must hold for them, give the table to another role instead: ALTER TABLE'
                ' %1$s OWNER TO ...', stream_qualified(tbl), r.rolname)
            ELSE format('ALTER ROLE %I BYPASSRLS, as a superuser', r.rolname) END
    FROM pg_class c JOIN pg_roles r ON r.oid = coalesce(stream_runs_as(c.oid), current_user::regrole)
    WHERE c.oid = tbl AND c.relrowsecurity AND NOT (r.rolsuper OR r.rolbypassrls)
        AND (c.relforcerowsecurity OR NOT pg_has_role(r.oid, c.relowner, 'USAGE'))
$$;
