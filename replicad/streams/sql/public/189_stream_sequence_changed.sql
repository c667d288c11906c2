-- stream_sequence_changed(name, what): says what a change of the stream's sequence has done to its ids, in the transaction of
-- that change or after it; without it daemons find out as far as they can (stream_kept_upto), and the stream stops where they cannot
-- (stream_question). `same`: every row has the id that it had,
-- and the next one is above them, as after ALTER COLUMN ... TYPE bigint of an identity column, which writes all rows anew.
-- Readers go on then. `restarted`: ids begin again. Then all of them are read from the start. Returns the id of the present
-- generation. Raises RS001, and RS002 where the sequence is below what was published. Writes what stream_fork writes.
CREATE OR REPLACE FUNCTION stream_sequence_changed(name text, what text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
    noted bigint := (SELECT max(p.position) FROM stream_position p WHERE p.stream = s.number);
BEGIN
    IF what IS NULL OR what NOT IN ('same', 'restarted') THEN
        PERFORM stream_refuse_argument(format('%L is not what can have happened to a sequence', what),
            'say `same` where all rows have the ids that they had, or `restarted` where ids begin again');
    ELSIF what = 'same' AND (pg_sequence_last_value(s.sequence) >= noted) IS FALSE THEN
        PERFORM stream_refuse(format('sequence %s stands at %s, and stream %s was published up to %s: ids will come again',
            s.sequence, pg_sequence_last_value(s.sequence), s.name, noted),
            format('SELECT setval(%L, %s) first, or say `restarted`', s.sequence, noted));
    END IF;
    RETURN stream_fork(s.number, stream_epoch(s), CASE what WHEN 'same' THEN 'sequence_kept' ELSE 'ids_went_back' END);
END
$$;
COMMENT ON FUNCTION stream_sequence_changed(text, text) IS 'Says whether a changed sequence has kept its ids';
