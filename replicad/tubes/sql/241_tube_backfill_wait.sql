-- tube_backfill_step1(): notes the sequence before a backfill: pods with this seq or less are older than it. Returns it
-- as text, start_seq of the control pods. Writes tube_seq. Its transaction must end before step 2 begins.
CREATE OR REPLACE FUNCTION tube_backfill_step1() RETURNS text
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT nextval('tube_seq')::text
$$;
COMMENT ON FUNCTION tube_backfill_step1() IS 'First step of a backfill: note the sequence';

-- tube_writers(): the transactions that hold a lock by which a tube's pods are written: virtualtransaction, pid (NULL
-- for a prepared one). Writes nothing.
CREATE OR REPLACE FUNCTION tube_writers() RETURNS TABLE (virtualtransaction text, pid integer)
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT DISTINCT l.virtualtransaction, l.pid
    FROM pg_locks l
    WHERE l.locktype = 'relation' AND l.granted AND l.mode = 'RowExclusiveLock'
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.relation IN (SELECT to_regclass(format('%I.%I', current_schema(), r.tube)) FROM tube_registry r)
        AND l.pid IS DISTINCT FROM pg_backend_pid()
$$;
COMMENT ON FUNCTION tube_writers() IS 'The transactions that are writing pods';

-- tube_backfill_step2(timeout): waits until every transaction that was writing pods when it was called has ended, so
-- that no pod older than the number of step 1 can turn up after the backfill. Raises 55P03, naming the culprit, when
-- one lasts longer than timeout; then call it again. It needs READ COMMITTED. Writes nothing.
--
-- A writer locks the tube before it draws a seq and keeps the lock to its end, hence nobody else need be waited for. A
-- transaction that is prepared may change its name on the way (a restart does that): those are looked for in a second
-- round.
CREATE OR REPLACE FUNCTION tube_backfill_step2(timeout interval = '60 seconds') RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    deadline timestamptz := clock_timestamp() + timeout;
    awaited text[];
    culprit text;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM tube_refuse('RT005', 'step 2 of a backfill waits for others, which needs READ COMMITTED',
            'call it in a transaction of its own, at the default isolation level');
    END IF;
    FOR round IN 1..2 LOOP
        SELECT array_agg(w.virtualtransaction) INTO awaited FROM tube_writers() w WHERE round = 1 OR w.pid IS NULL;
        WHILE EXISTS (SELECT FROM tube_writers() w WHERE w.virtualtransaction = ANY (awaited)) LOOP
            IF clock_timestamp() >= deadline THEN
                SELECT string_agg(CASE WHEN w.pid IS NULL THEN (
                            SELECT format('prepared transaction %L', x.gid) FROM pg_prepared_xacts x
                                JOIN pg_locks l ON l.transactionid = x.transaction
                            WHERE l.virtualtransaction = w.virtualtransaction AND l.pid IS NULL)
                        ELSE format('pid %s (%s, %s)', w.pid, s.application_name, left(s.query, 100)) END, ', ')
                    INTO culprit
                    FROM tube_writers() w LEFT JOIN pg_stat_activity s ON s.pid = w.pid
                    WHERE w.virtualtransaction = ANY (awaited);
                PERFORM tube_refuse('55P03',
                    format('transactions that write pods did not end within %s: %s', timeout, culprit),
                    'end them, or call step 2 again');
            END IF;
            PERFORM pg_sleep(0.02);
        END LOOP;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tube_backfill_step2(interval) IS 'Second step of a backfill: wait for transactions in flight';
