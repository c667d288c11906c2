-- tube_index_ensure(tube, partitions): creates the index for reading a partition: ((shard % partitions), priority, seq)
-- with priority 0 for regular and 1 for backfill pods. Raises RT005 if its name is taken. Writes indexes of the tube.
--
-- One index serves all partitions and both priorities, so that the cost of an insert does not depend on the number of
-- partitions (a partial index for each pair costs every insert about 1 us). No statistics are gathered for it and for
-- seq: those of a queue are wrong a minute later, and with them the planner sorts a whole partition to return its first
-- pods. Without statistics it expects few rows and uses the index. The index of another number of partitions is
-- dropped. While readers have the table locked, the DROP would make them and all writers wait. So it gives up after
-- half a second (before the deadlock check of other waiting transactions), and the index stays until the next call.
CREATE OR REPLACE FUNCTION tube_index_ensure(tube text, partitions integer) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    wanted text := tube || '_pods_' || partitions;
    patience text := current_setting('lock_timeout');
    stale regclass;
BEGIN
    IF to_regclass(quote_ident(wanted)) IS NULL THEN
        EXECUTE format('CREATE INDEX %I ON %I ((shard %% %s), ((op = ''B'')::integer), seq)', wanted, tube, partitions);
        EXECUTE format('ALTER INDEX %I ALTER COLUMN 1 SET STATISTICS 0, ALTER COLUMN 2 SET STATISTICS 0', wanted);
    ELSIF NOT EXISTS (SELECT FROM pg_index i
            WHERE i.indexrelid = to_regclass(quote_ident(wanted)) AND i.indrelid = to_regclass(quote_ident(tube))) THEN
        PERFORM tube_refuse('RT005', format('%I.%I exists and is no index of tube %L', current_schema(), wanted, tube),
            'choose another name for the tube, or rename what has it');
    END IF;
    FOR stale IN SELECT i.indexrelid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
        WHERE i.indrelid = to_regclass(quote_ident(tube)) AND c.relname <> wanted
            AND left(c.relname, length(tube)) = tube AND substr(c.relname, length(tube) + 1) ~ '^_pods_[0-9]+$'
    LOOP
        BEGIN
            PERFORM set_config('lock_timeout', '500ms', true);
            EXECUTE format('DROP INDEX %s', stale);
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            RAISE NOTICE 'index % is in use and stays until tube_ensure_exists is called again', stale;
        END;
        PERFORM set_config('lock_timeout', patience, true);
    END LOOP;
END
$$;

-- tube_table_ensure(tube): creates the table of a new tube. Raises RT005 if a name is taken. Writes table and indexes.
-- No CHECKs: each would cost every write of an attached table 2 us, and the functions that insert check their
-- arguments.
CREATE OR REPLACE FUNCTION tube_table_ensure(tube text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format($sql$
        CREATE TABLE %1$I (
            seq bigint NOT NULL DEFAULT nextval(%2$L) PRIMARY KEY,
            op character(1) NOT NULL,
            shard integer NOT NULL,
            ids bigint[] NOT NULL,
            payload jsonb,
            ts timestamptz NOT NULL DEFAULT clock_timestamp()
        ) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000)
    $sql$, tube, format('%I.tube_seq', current_schema()));
    EXECUTE format('ALTER TABLE %I ALTER ids SET STORAGE PLAIN, ALTER seq SET STATISTICS 0', tube);
    EXECUTE format('CREATE INDEX %I ON %I (shard, seq) WHERE cardinality(ids) = 0', tube || '_control', tube);
    EXECUTE format('COMMENT ON TABLE %I IS %L', tube,
        'replicad: the pods of a tube; use tube_ensure_absent() to drop it');
    PERFORM tube_belong(format('TABLE %I', tube));
EXCEPTION WHEN duplicate_table THEN
    PERFORM tube_refuse('RT005', format('tube %L needs the name of something that exists: %s', tube, SQLERRM),
        'choose another name for the tube, or rename what has it');
END
$$;
