-- Rights: a role that may write a stream may join its writers, share its keys and leave (writer_find_own checks it). Only
-- the owner decides whether a stream is shared at all. writer_owns changes nothing and so needs no right. Rows are changed
-- through the functions alone, which run with their owner's rights. Every function looks its neighbours up in this schema
-- alone, whatever the caller's search_path; functions that are inlined need no neighbours, or name them in full.
DO $rights$
DECLARE
    f record;
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO PUBLIC', current_schema());
    GRANT SELECT ON writer_sharding, writer_member, writer_slot TO PUBLIC;
    FOR f IN SELECT p.oid::regprocedure AS name, p.proname
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = current_schema() AND p.proname ~ '^writer_'
    LOOP
        IF f.proname NOT IN ('writer_slot_of', 'writer_lock_key') THEN
            EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', f.name, current_schema());
        END IF;
        IF f.proname IN ('writer_join', 'writer_beat', 'writer_expel', 'writer_retire', 'writer_leave', 'writer_take',
                'writer_give', 'writer_owns') THEN
            EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER', f.name);
        ELSIF f.proname IN ('writer_enable', 'writer_disable', 'writer_changed', 'writer_lock',
                'writer_lock_slots') THEN
            EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f.name);
        END IF;
    END LOOP;
END
$rights$;
