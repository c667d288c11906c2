-- The least roles that replicad needs in this database; docs/access.md says what each grant is for. Run it as a superuser, or
-- as a role with CREATEROLE that owns the database. Run it again when `replicad serve` has installed its schemas, and after an
-- upgrade: what did not exist before is granted then; as a superuser, or as the daemon's role, which owns these schemas.
-- It grants nothing to PUBLIC and revokes nothing.
--
-- Clients of the daemon (readers of streams, workers of tubes) need no role in Postgres: --access-file says what they may do.
DO $roles$
DECLARE
    daemon name := {daemon};
    role text;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('replicad schema'), hashtext('roles'));
    FOREACH role IN ARRAY {all} LOOP
        IF to_regrole(quote_ident(role)) IS NULL THEN
            EXECUTE format('CREATE ROLE %I LOGIN', role);
        END IF;
    END LOOP;

    -- The daemon: installs schemas of its own, and serves what is in them.
    IF NOT (has_database_privilege(daemon, current_database(), 'CREATE')
            AND has_database_privilege(daemon, current_database(), 'CONNECT')) THEN
        EXECUTE format('GRANT CONNECT, CREATE ON DATABASE %I TO %I', current_database(), daemon);
    END IF;
    -- It reads tables, and runs predicates of tubes, as their owners: for that it must be able to act as each of them.
    FOREACH role IN ARRAY {owners} LOOP
        IF (SELECT r.rolsuper FROM pg_roles r WHERE r.rolname = role) THEN
            RAISE EXCEPTION 'role % is a superuser, and the daemon must not be able to act as one', role
                USING HINT = format('give its tables to another role, or: GRANT SELECT ON the table and its sequence TO %I', daemon);
        ELSIF NOT pg_has_role(daemon, role, 'MEMBER') THEN
            EXECUTE format('GRANT %I TO %I', role, daemon);
        END IF;
    END LOOP;
    -- It shows what holds a stream back, with age and query. Without it, the pid and the name are all.
    FOREACH role IN ARRAY daemon::text || {operators} LOOP
        CONTINUE WHEN pg_has_role(role, 'pg_read_all_stats', 'USAGE');
        BEGIN
            EXECUTE format('GRANT pg_read_all_stats TO %I', role);
        EXCEPTION WHEN insufficient_privilege THEN
            RAISE NOTICE 'role % may not see queries of other sessions: %', role, SQLERRM;
        END;
    END LOOP;
END
$roles$;
