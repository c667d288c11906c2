-- stream_writer_holder(s, names): a transaction that may yet commit rows of one of these writers (NULL: of any), and how it is
-- ended; NULLs where there is none. That is: one that has written to the table, or holds ids of a reserved stream, and is
-- prepared (the name of its session is not known any more), or of a session that is called after no other writer.
CREATE OR REPLACE FUNCTION stream_writer_holder(s stream, names text[], OUT holder text, OUT remedy text)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    one record;
BEGIN
    SELECT l.pid, a.application_name, p.gid INTO one
    FROM pg_locks l
    LEFT JOIN pg_stat_get_activity(NULL) a ON a.pid = l.pid
    LEFT JOIN pg_locks x ON l.pid IS NULL AND x.locktype = 'transactionid' AND x.pid IS NULL
        AND x.virtualtransaction = l.virtualtransaction
    LEFT JOIN pg_prepared_xact() p ON p.transaction = x.transactionid
    WHERE l.granted AND l.locktype = 'relation' AND l.pid IS DISTINCT FROM pg_backend_pid()
        AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.relation IN (SELECT t::oid FROM stream_tables(s.relation) t)
        AND (l.pid IS NULL OR names IS NULL OR EXISTS (SELECT FROM unnest(names) n WHERE stream_holds_back(s.number, a.application_name, n)))
    ORDER BY p.gid, l.pid LIMIT 1;
    IF NOT FOUND AND s.method = 'reservation' THEN
        SELECT h.pid, h.session AS application_name, NULL::text AS gid INTO one FROM stream_held(s.number) h
        WHERE h.pid IS NULL OR names IS NULL OR EXISTS (SELECT FROM unnest(names) n WHERE stream_holds_back(s.number, h.session, n))
        ORDER BY h.pid LIMIT 1;
    END IF;
    IF FOUND AND one.pid IS NULL THEN
        holder := coalesce(format('prepared transaction %L', one.gid), 'a prepared transaction');
        remedy := 'COMMIT PREPARED or ROLLBACK PREPARED it first (pg_prepared_xacts lists them)';
    ELSIF FOUND THEN
        holder := format('the session with pid %s (%s)', one.pid, one.application_name);
        remedy := format('end its transaction first, or SELECT pg_terminate_backend(%s)', one.pid);
    END IF;
END
$$;
