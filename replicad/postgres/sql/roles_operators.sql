-- Operators look, and change nothing: status, top; streams list, show, writers and acks; tubes list and stats; writers list; what is
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
                'stream_version', 'stream_ack', 'stream_trouble', 'stream_daemon', 'ownership_version', 'federation_version', 'federation_sender', 'federation_parked',
                'tube_version', 'tube_registry', 'tube_attachment', 'tube_backfill', 'tube_lease', 'tube_parked', 'tube_report')
        LOOP
            EXECUTE format('GRANT USAGE ON SCHEMA %s TO %I', folder, role);
            -- Without the terms of leases: who sends one over TCP speaks for the lease.
            EXECUTE format('GRANT SELECT%s ON TABLE %s TO %I',
                CASE WHEN name LIKE '%.tube_lease' THEN ' (tube, partitions, partition, holder, beat, ttl)' ELSE '' END, name, role);
        END LOOP;
        FOR reports IN SELECT to_regprocedure(f) FROM unnest({reports}) f WHERE to_regprocedure(f) IS NOT NULL LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', reports, role);
        END LOOP;
    END LOOP;
END
$operators$;
