-- tube_lock_table(tbl): until the transaction ends no other transaction attaches or detaches this table. Takes an
-- advisory lock: a lock of the table itself would make its writers wait even if there is nothing to do.
CREATE OR REPLACE FUNCTION tube_lock_table(tbl regclass) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT pg_advisory_xact_lock(
        hashtext('replicad tube ' || current_schema()), (tbl::oid::bigint - 2147483648)::integer)
$$;

-- tube_member_detach(tube, tbl): drops the tube's triggers on one table or partition. Writes tube_attachment, triggers.
CREATE OR REPLACE FUNCTION tube_member_detach(tube text, tbl regclass) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    trigger_name name;
BEGIN
    FOR trigger_name IN SELECT x.name FROM tube_triggers_of(tube, tbl) x LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', trigger_name, tube_qualified(tbl));
    END LOOP;
    DELETE FROM tube_attachment a WHERE a.tube = tube_member_detach.tube AND a.tbl = tube_member_detach.tbl;
END
$$;
