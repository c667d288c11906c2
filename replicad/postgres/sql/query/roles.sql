-- What `replicad sql roles` prints: the roles that replicad needs, with the rights of each.

-- name: roles
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

-- name: roles_replication
-- The daemon hears of commits at once over a replication connection (extra `bell`). The attribute lets it read all WAL of the
-- server, so that it is given only where `--replication` asks for it; a superuser gives it, or a role that has it and CREATEROLE.
DO $replication$
BEGIN
    IF NOT (SELECT r.rolreplication FROM pg_roles r WHERE r.rolname = {daemon}) THEN
        EXECUTE format('ALTER ROLE %I WITH REPLICATION', {daemon});
    END IF;
END
$replication$;

-- name: roles_writers
-- Writers insert into tables by rights that they have already. Besides they take ids of the sequence of a stream whose ids are
-- reserved, if they may insert into its table; and they invalidate caches.
DO $writers$
DECLARE
    role text;
    reserved record;
BEGIN
    FOREACH role IN ARRAY {writers} LOOP
        IF to_regclass({stream_table}) IS NOT NULL THEN
            FOR reserved IN EXECUTE 'SELECT s.relation, s.sequence FROM ' || {stream_table} || ' s JOIN pg_class c ON c.oid = s.relation '
                'WHERE s.method = ''reservation'' AND has_any_column_privilege($1, s.relation, ''INSERT'')' USING role
            LOOP
                EXECUTE format('GRANT USAGE ON SEQUENCE %s TO %I', reserved.sequence, role);
            END LOOP;
        END IF;
        IF to_regprocedure({cache_write}) IS NOT NULL THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', to_regprocedure({cache_write}), role);
        END IF;
    END LOOP;
END
$writers$;

-- name: roles_operators
-- Operators look, and change nothing: status, top; streams list, show, writers and acks; tubes list and stats; sharding list; what is
-- parked. They see no rows of tables, no pods and no secrets. What needs rows (how many rows a stream lags) is not shown to them.
DO $operators$
DECLARE
    role text;
    folder text;
    name text;
    reports regprocedure;
BEGIN
    FOREACH role IN ARRAY {operators} LOOP
        IF NOT has_database_privilege(role, current_database(), 'CONNECT') THEN
            EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), role);
        END IF;
        FOR folder, name IN
            SELECT c.relnamespace::regnamespace, format('%I.%I', n.nspname, c.relname)
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = ANY ({schemas}) AND c.relname IN (
                'stream_version', 'stream_ack', 'stream_trouble', 'stream_daemon', 'sharding_version', 'federation_version', 'federation_sender', 'federation_parked', 'federation_destination', 'federation_destination_room', 'federation_edu',
                'tube_version', 'tube_registry', 'tube_attachment', 'tube_backfill', 'tube_lease', 'tube_parked', 'tube_report')
        LOOP
            EXECUTE format('GRANT USAGE ON SCHEMA %s TO %I', folder, role);
            -- Without the terms of leases: who sends one over TCP speaks for the lease. Without the content of updates.
            EXECUTE format('GRANT SELECT%s ON TABLE %s TO %I',
                CASE WHEN name LIKE '%.tube_lease' THEN ' (tube, partitions, partition, holder, beat, ttl)'
                    WHEN name LIKE '%.federation_edu' THEN ' (id, source, destination, key)' ELSE '' END, name, role);
        END LOOP;
        FOR reports IN SELECT to_regprocedure(f) FROM unnest({reports}) f WHERE to_regprocedure(f) IS NOT NULL LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', reports, role);
        END LOOP;
    END LOOP;
END
$operators$;
