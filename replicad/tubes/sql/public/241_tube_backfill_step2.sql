-- tube_backfill_step2(timeout): waits until every transaction that was writing pods when it was called has ended, so
-- that no pod with a seq below the number of step 1 can appear after the backfill. Raises 55P03, with the transaction,
-- if one lasts longer than timeout; then call it again. It needs READ COMMITTED. Writes nothing.
--
-- A writer locks the tube before it gets a seq and keeps the lock until it ends, so only holders of that lock must be
-- waited for. A prepared transaction may change its virtualtransaction (after a restart), so there is a second round.
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
