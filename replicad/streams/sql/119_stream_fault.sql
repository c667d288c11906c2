-- stream_fault(s): why a registered stream can no longer be served, with the remedy; NULL where it can.
-- Tables and sequences change after they were registered.
CREATE OR REPLACE FUNCTION stream_fault(s stream) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    fault record;
    missing name;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.relation) THEN
        RETURN format('its table was dropped; run: SELECT %I.stream_remove(%L)', current_schema(), s.name);
    END IF;
    SELECT needed INTO missing FROM unnest(ARRAY[s.id_column, s.instance_column]) needed
    WHERE needed IS NOT NULL AND NOT EXISTS (
        SELECT FROM pg_attribute a WHERE a.attrelid = s.relation AND a.attname = needed AND NOT a.attisdropped);
    IF FOUND THEN
        RETURN format('table %s has no column %I any more; remove the stream and add it anew', s.relation, missing);
    END IF;
    IF s.positions IS NOT NULL AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.positions) THEN
        RETURN 'its table of positions was dropped; remove the stream and add it anew';
    END IF;
    SELECT * INTO fault FROM stream_sequence_fault(s.sequence, s.method);
    IF fault.problem IS NULL THEN
        SELECT * INTO fault FROM stream_name_fault(s);
    END IF;
    IF fault.problem IS NULL THEN
        SELECT * INTO fault FROM stream_feed_fault(s);
    END IF;
    IF fault.problem IS NULL THEN
        SELECT * INTO fault FROM stream_ids_fault(s);
    END IF;
    IF fault.problem IS NULL THEN
        SELECT * INTO fault FROM stream_question_of(s);
    END IF;
    RETURN fault.problem || '; ' || fault.remedy;
END
$$;
-- stream_strayed(number): the part of stream_fault that a poll asks for: ids may belong to rows of another table, or come
-- from elsewhere. NULL where that is not so, or there is no such stream.
CREATE OR REPLACE FUNCTION stream_strayed(stream_number integer) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s stream;
    fault record;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number;
    SELECT * INTO fault FROM stream_name_fault(s);
    IF fault.problem IS NULL THEN
        SELECT * INTO fault FROM stream_feed_fault(s);
    END IF;
    IF fault.problem IS NULL THEN
        SELECT * INTO fault FROM stream_ids_fault(s);
    END IF;
    RETURN fault.problem || '; ' || fault.remedy;
END
$$;
