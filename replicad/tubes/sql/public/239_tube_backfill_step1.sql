-- tube_backfill_step1(): notes the sequence before a backfill: pods with this seq or less are older than it. Returns it
-- as text, start_seq of the control pods. Writes tube_seq. Its transaction must end before step 2 begins.
CREATE OR REPLACE FUNCTION tube_backfill_step1() RETURNS text
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT nextval('tube_seq')::text
$$;
COMMENT ON FUNCTION tube_backfill_step1() IS 'First step of a backfill: note the sequence';
