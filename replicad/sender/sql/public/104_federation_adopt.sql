-- federation_adopt(facts, others): what senders of versions 1 and 2 have recorded is of the stream of facts `facts`, all
-- of it: those versions did not record which stream it is of. `others` are streams whose facts such a sender delivered at
-- other times: senders of them go on behind the token that was recorded. Returns how many facts were outstanding. Call
-- it when `replicad sender` asks for it. Raises 55000 while a sender of those versions is running, and 22023 where they
-- have recorded no such stream. Writes all tables of the part.
CREATE OR REPLACE FUNCTION federation_adopt(facts text, others text[] DEFAULT '{}') RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    unkeyed text[];
    outstanding bigint;
BEGIN
    LOCK TABLE federation_sender IN SHARE ROW EXCLUSIVE MODE;
    IF EXISTS (SELECT FROM federation_source_running('')) THEN
        RAISE EXCEPTION 'a sender of an older replicad is running; stop it first' USING ERRCODE = '55000';
    END IF;
    SELECT array_agg(DISTINCT s.stream) INTO unkeyed FROM federation_sender s WHERE s.source = '';
    IF unkeyed IS NULL OR NOT (others || facts <@ unkeyed) THEN
        RAISE EXCEPTION 'what an older replicad has recorded here is of the streams %, not of all of %',
            coalesce(array_to_string(unkeyed, ', '), '(none)'), array_to_string(facts || others, ', ')
            USING ERRCODE = '22023';
    END IF;
    UPDATE federation_sender s SET source = s.stream
        WHERE s.source = '' AND s.stream = ANY (others) AND s.stream <> facts
            AND NOT EXISTS (SELECT FROM federation_sender t WHERE t.source = s.stream);
    DELETE FROM federation_sender s WHERE s.source = '' AND s.stream = ANY (others) AND s.stream <> facts;
    UPDATE federation_sender SET source = facts WHERE source = '';
    UPDATE federation_destination SET source = facts WHERE source = '';
    UPDATE federation_destination_room SET source = facts WHERE source = '';
    GET DIAGNOSTICS outstanding = ROW_COUNT;
    UPDATE federation_fact SET source = facts WHERE source = '';
    UPDATE federation_edu SET source = facts WHERE source = '';
    RETURN outstanding;
END
$$;
COMMENT ON FUNCTION federation_adopt(text, text[]) IS 'Gives what an older replicad has recorded to a stream';
