-- stream_runs_as(tbl): the owner of a table as whom statements that read it must run; NULL where the asking role runs them
-- itself: it is the owner, or the owner is a superuser. Whoever owns a table has code run by those who read it: a cast of
-- one of its types, a policy, a function in an index.
CREATE OR REPLACE FUNCTION stream_runs_as(tbl regclass) RETURNS oid
LANGUAGE sql STABLE AS $$
    SELECT c.relowner FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner
    WHERE c.oid = tbl AND r.rolname <> current_user AND NOT r.rolsuper
$$;
