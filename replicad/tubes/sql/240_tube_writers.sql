-- tube_writers(): the transactions that hold a lock for writing pods of a tube: virtualtransaction, pid (NULL for a
-- prepared transaction). Writes nothing.
CREATE OR REPLACE FUNCTION tube_writers() RETURNS TABLE (virtualtransaction text, pid integer)
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT DISTINCT l.virtualtransaction, l.pid
    FROM pg_locks l
    WHERE l.locktype = 'relation' AND l.granted AND l.mode = 'RowExclusiveLock'
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.relation IN (SELECT to_regclass(format('%I.%I', current_schema(), r.tube)) FROM tube_registry r)
        AND l.pid IS DISTINCT FROM pg_backend_pid()
$$;
