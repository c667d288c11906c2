-- tube_truncate_trigger(tube): BEFORE TRUNCATE trigger of attached tables; touches every id of the table as deleted.
-- Writes the tube. Postgres fires it for each partition or heir that a TRUNCATE reaches, so each table touches its own
-- rows, and those of partitions or heirs that were created after the attachment and have no trigger yet.
--
-- It reads the table with the rights of the table's owner. If row security would hide rows, it fails instead of missing them.
--
-- TRUNCATE removes all rows, but a transaction above READ COMMITTED reads with its snapshot, in which rows that were
-- committed later are missing. Their ids would not be touched, so there TRUNCATE is refused (RT005). Nothing in SQL shows
-- whether the snapshot is as new as the lock.
CREATE OR REPLACE FUNCTION tube_truncate_trigger() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
DECLARE
    a tube_attachment;
    t tube_registry;
    source text;
    rows text;
    touch text;
BEGIN
    SELECT * INTO a FROM tube_attachment x WHERE x.tube = TG_ARGV[0] AND x.tbl = TG_RELID;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        PERFORM tube_refuse('RT005',
            format('table %s is attached to tube %L, so TRUNCATE needs the isolation level READ COMMITTED, and this '
                'transaction is %s: rows that were committed after it began would be removed and not recorded',
                TG_RELID::regclass, a.tube, upper(current_setting('transaction_isolation'))),
            'run TRUNCATE in a transaction of its own at READ COMMITTED, or use DELETE');
    END IF;
    t := tube_find(a.tube);
    SELECT format('(SELECT * FROM %s WHERE tableoid = ANY (%L::oid[]))', tube_qualified(TG_RELID), array_agg(m::oid))
        INTO source
        FROM tube_members(TG_RELID) m
        WHERE m = TG_RELID OR NOT EXISTS (SELECT FROM tube_attachment x WHERE x.tube = a.tube AND x.tbl = m);
    rows := tube_rows_sql(source, tube_where(t.predicate, a.predicate), a.routing);
    IF tube_runs_as(TG_RELID) IS NOT NULL THEN
        rows := format('SELECT r.tube_shard, r.id FROM %I.tube_owner_rows(%L::oid::regclass, %L, %L) AS r', current_schema(),
            TG_RELID, format('SELECT %s AS tube_shard, found.id, 0 AS n FROM (%s) AS found',
                CASE WHEN a.routing IS NULL THEN 'NULL' ELSE 'found.tube_shard' END, rows),
            tube_path_text(t.path || a.path));
    END IF;
    touch := tube_insert_sql(a.tube, tube_op_sql('''D'''), a.shard::text, rows, routed => a.routing IS NOT NULL);
    PERFORM set_config('search_path', tube_path_text(t.path || a.path), true);
    EXECUTE touch;
    RETURN NULL;
END
$$;
REVOKE EXECUTE ON FUNCTION tube_truncate_trigger() FROM PUBLIC;
