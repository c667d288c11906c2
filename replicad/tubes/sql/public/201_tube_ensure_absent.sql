-- tube_ensure_absent(tube): detaches all its tables and drops the tube with its pods, leases and parked ids. Does
-- nothing if there is no such tube. It locks one table after another; where programs write to several of them, detach
-- the tables first, each in a transaction of its own with a short lock_timeout, as `replicad tubes drop` does. Writes
-- tube_registry and the tables that refer to it, triggers, functions, the table.
CREATE OR REPLACE FUNCTION tube_ensure_absent(tube text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    root regclass;
BEGIN
    PERFORM FROM tube_registry r WHERE r.tube = tube_ensure_absent.tube FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- A worker that acks has its lease first, then its pods. In this order here too, they do not wait in a circle.
    DELETE FROM tube_lease l WHERE l.tube = tube_ensure_absent.tube;
    FOR root IN SELECT a.tbl FROM tube_attachment a WHERE a.tube = tube_ensure_absent.tube AND a.tbl = a.root
        ORDER BY a.tbl::oid
    LOOP
        PERFORM tube_table_ensure_detached(tube, root);
    END LOOP;
    PERFORM tube_trigger_sweep(tube);  -- those of tables that were dropped
    DELETE FROM tube_registry r WHERE r.tube = tube_ensure_absent.tube;
    DELETE FROM tube_shard k WHERE k.tube = tube_ensure_absent.tube;
    DELETE FROM tube_low l WHERE l.tube = tube_ensure_absent.tube;
    EXECUTE format('DROP FUNCTION IF EXISTS %I()', tube_object_name(tube, '_trigger'));
    EXECUTE format('DROP FUNCTION IF EXISTS %I(integer, bigint[], character, jsonb, integer)',
        tube_object_name(tube, '_touch'));
    EXECUTE format('DROP TABLE IF EXISTS %I', tube);
END
$$;
COMMENT ON FUNCTION tube_ensure_absent(text) IS 'Detaches all tables of a tube and drops it';
