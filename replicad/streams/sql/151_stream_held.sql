-- stream_held(number): the bounds that are held with a proof, and whether they have a certificate (stream_reserve): a session
-- that ends lets go of its locks one by one, so both must be the same session's. `session` is its application_name; NULL
-- for a prepared transaction, as pid is. While it is being prepared, some of its locks have a pid still: so these are known
-- by the virtual transaction. Runs with its owner's rights, since only these may know which proofs are genuine.
CREATE OR REPLACE FUNCTION stream_held(number integer)
RETURNS TABLE (pid integer, session text, bound bigint, certified boolean)
LANGUAGE sql VOLATILE SECURITY DEFINER AS $$
    WITH held AS MATERIALIZED (  -- one look at the lock table, which is a consistent one
        SELECT l.pid, l.virtualtransaction AS within, l.transactionid,
            (l.classid::bigint << 32) | l.objid::bigint AS key
        FROM pg_locks l
        WHERE l.granted AND (
            l.locktype = 'advisory' AND l.objsubid = 1 AND l.mode = 'ShareLock'
                AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
            OR l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock')
    ), reserved AS MATERIALIZED (
        SELECT h.* FROM held h
        WHERE h.key BETWEEN stream_lock_key(number, 0) AND stream_lock_key(number, 281474976710655)
    ), proven AS MATERIALIZED (
        SELECT p.within, p.pid FROM (
            SELECT h.within, NULL::integer AS pid, stream_proof_key(number, 'x' || h.transactionid) AS key
            FROM held h WHERE h.transactionid IS NOT NULL AND h.within IN (SELECT r.within FROM reserved r)
            UNION ALL
            SELECT NULL, r.pid, stream_proof_key(number, format('s%s %s', a.pid, a.usesysid))
            FROM (SELECT DISTINCT x.pid FROM reserved x) r, pg_stat_get_activity(r.pid) a
            WHERE r.pid IS NOT NULL
        ) p
        WHERE EXISTS (SELECT FROM held h WHERE h.key = p.key AND (h.within = p.within OR h.pid = p.pid))
    )
    SELECT r.pid, (SELECT a.application_name FROM pg_stat_get_activity(r.pid) a WHERE r.pid IS NOT NULL),
        r.key & 281474976710655,
        r.pid IS NOT NULL AND EXISTS (SELECT FROM held c WHERE c.pid = r.pid
            AND c.key = stream_lock_key(number, r.key & 281474976710655, true))
    FROM reserved r
    WHERE r.within IN (SELECT p.within FROM proven p WHERE p.within IS NOT NULL)
        OR r.pid IN (SELECT p.pid FROM proven p WHERE p.pid IS NOT NULL)
$$;
