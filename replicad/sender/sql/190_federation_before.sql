-- The functions that senders of versions 1 and 2 call, with the arguments and results of then. Those senders know no
-- source. What they record has the source '', until a sender of this version takes it over (federation_source_enlist).
-- They are gone when part.toml says that version 2 is served no longer.
CREATE OR REPLACE FUNCTION federation_key(sender text) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT federation_source_key('', sender)
$$;
COMMENT ON FUNCTION federation_key(text) IS 'Version 1: advisory lock key of a running sender';
-- One of that version is refused where a sender of this version has one of its streams: it would find nothing of what is
-- outstanding.
CREATE OR REPLACE FUNCTION federation_enlist(sender text, senders text[], streams text[]) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    taken text;
    refusal text;
BEGIN
    SELECT e.refusal INTO refusal FROM federation_source_enlist('', sender, senders, '{}') e;
    IF refusal IS NULL THEN  -- the table is locked now
        SELECT s.source INTO taken FROM federation_sender s
        WHERE s.source = ANY (federation_enlist.streams) ORDER BY s.source LIMIT 1;
        IF taken IS NOT NULL THEN
            RETURN format('a newer replicad delivers the stream %s: use that one', taken);
        END IF;
        SELECT e.refusal INTO refusal FROM federation_source_enlist('', sender, senders, streams) e;
    END IF;
    RETURN refusal;
END
$$;
COMMENT ON FUNCTION federation_enlist(text, text[], text[]) IS 'Version 1: makes this session one that runs as a sender';
CREATE OR REPLACE FUNCTION federation_begin(stream text, token bigint) RETURNS void
LANGUAGE sql AS $$
    SELECT federation_source_begin('', stream, token)
$$;
COMMENT ON FUNCTION federation_begin(text, bigint) IS 'Version 1: where all senders begin with a stream';
CREATE OR REPLACE FUNCTION federation_follow(sender text, stream text, epoch text) RETURNS void
LANGUAGE sql AS $$
    SELECT federation_source_follow('', sender, stream, epoch)
$$;
COMMENT ON FUNCTION federation_follow(text, text, text) IS 'Version 2: of which generation a recorded token is';
CREATE OR REPLACE FUNCTION federation_record(sender text, stream text, upto bigint, tokens bigint[], parts integer[],
    rooms text[], bodies text[], numbers integer[], names text[], newcomers text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM federation_source_record('', sender, stream, upto, tokens, parts, rooms, bodies, numbers, names, newcomers);
END
$$;
COMMENT ON FUNCTION
    federation_record(text, text, bigint, bigint[], integer[], text[], text[], integer[], text[], text[])
    IS 'Version 1: records facts and the destinations that are to take them';
CREATE OR REPLACE FUNCTION federation_record_edus(sender text, stream text, upto bigint, names text[], keys text[],
    bodies text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM federation_source_record_edus('', sender, stream, upto, names, keys, bodies);
END
$$;
COMMENT ON FUNCTION federation_record_edus(text, text, bigint, text[], text[], text[])
    IS 'Version 1: records updates that may not be dropped';
CREATE OR REPLACE FUNCTION federation_write(entries json) RETURNS void
LANGUAGE sql AS $$
    SELECT federation_source_write('', entries)
$$;
COMMENT ON FUNCTION federation_write(json) IS 'Version 1: writes down how destinations stand';
CREATE OR REPLACE FUNCTION federation_collapse(names text[]) RETURNS bigint
LANGUAGE sql AS $$
    SELECT federation_source_collapse('', names)
$$;
COMMENT ON FUNCTION federation_collapse(text[]) IS 'Version 1: leaves only the latest fact of each room to destinations';
CREATE OR REPLACE FUNCTION federation_transaction(destination text)
RETURNS TABLE (id text, serial bigint, ts bigint, token bigint, part integer, edus text[], edu_ids bigint[],
    pdus text[], substituted boolean)
LANGUAGE sql STABLE AS $$
    SELECT t.id, t.serial, t.ts, t.token, t.part, t.edus, t.edu_ids, t.pdus, t.substituted
    FROM federation_source_transaction('', destination) t
$$;
COMMENT ON FUNCTION federation_transaction(text) IS 'Version 1: the transaction of a destination that is under way';
CREATE OR REPLACE FUNCTION federation_facts(destination text, most integer, most_bytes bigint)
RETURNS TABLE (token bigint, part integer, room text, body text, more boolean)
LANGUAGE sql STABLE AS $$
    SELECT f.token, f.part, f.room, f.body, f.more FROM federation_source_facts('', destination, most, most_bytes, 0, 0) f
$$;
COMMENT ON FUNCTION federation_facts(text, integer, bigint)
    IS 'Version 1: the oldest facts that a destination has yet to take';
CREATE OR REPLACE FUNCTION federation_edus(destination text, most integer) RETURNS TABLE (id bigint, body text)
LANGUAGE sql STABLE AS $$
    SELECT u.id, u.body FROM federation_source_edus('', destination, most) u
$$;
COMMENT ON FUNCTION federation_edus(text, integer) IS 'Version 1: the oldest updates that a destination has yet to take';
CREATE OR REPLACE FUNCTION federation_standing(after text, most integer)
RETURNS TABLE (name text, token bigint, part integer, serial bigint, failures integer, retry_in double precision,
    catching_up boolean, outstanding boolean)
LANGUAGE sql STABLE AS $$
    SELECT s.name, s.token, s.part, s.serial, s.failures, s.retry_in, s.catching_up, s.outstanding
    FROM federation_source_standing('', after, most) s
$$;
COMMENT ON FUNCTION federation_standing(text, integer) IS 'Version 1: how destinations stand, page by page';
CREATE OR REPLACE FUNCTION federation_sweep(stream text) RETURNS bigint
LANGUAGE sql AS $$
    SELECT s.removed FROM federation_source_sweep('', stream, 0, 0, 2147483647) s
$$;
COMMENT ON FUNCTION federation_sweep(text) IS 'Version 1: removes facts that every destination has taken';
CREATE OR REPLACE FUNCTION federation_rewind(sender text, stream text, token bigint, names text[]) RETURNS bigint
LANGUAGE sql AS $$
    SELECT federation_source_rewind('', sender, stream, token, names)
$$;
COMMENT ON FUNCTION federation_rewind(text, text, bigint, text[]) IS 'Version 1: begins a stream again behind a token';
