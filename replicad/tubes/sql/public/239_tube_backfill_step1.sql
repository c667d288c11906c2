-- tube_backfill_step1(): returns, as text, a number from the sequence of pods: pods with this seq or less are older
-- than the backfill. It is start_seq in the control pods. Writes tube_seq. Its transaction must end before step 2
-- begins.
CREATE OR REPLACE FUNCTION tube_backfill_step1() RETURNS text
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT nextval('tube_seq')::text
$$;
COMMENT ON FUNCTION tube_backfill_step1() IS 'First step of a backfill: note the sequence';
