-- writer_look(stream, since): what a writer must know, at one moment: all members, and the slots whose term is above
-- `since` (0: all of them), each list as arrays side by side. `version` is for the next look. Raises RS001, RS002.
-- Writes nothing.
CREATE OR REPLACE FUNCTION writer_look(
    stream text, since bigint,
    OUT version bigint, OUT slots integer,
    OUT instances text[], OUT member_terms bigint[], OUT beats bigint[], OUT ttls float8[], OUT addresses text[],
    OUT leaving boolean[],
    OUT changed integer[], OUT owners text[], OUT terms bigint[]
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    w writer_sharding := writer_find(stream);
BEGIN
    version := w.version;
    slots := w.slots;
    SELECT array_agg(m.instance), array_agg(m.term), array_agg(m.beat), array_agg(extract(epoch FROM m.ttl)::float8),
            array_agg(m.address), array_agg(m.leaving)
        INTO instances, member_terms, beats, ttls, addresses, leaving
        FROM writer_member m WHERE m.stream = w.stream;
    SELECT array_agg(x.slot), array_agg(x.owner), array_agg(x.term) INTO changed, owners, terms
        FROM writer_slot x WHERE x.stream = w.stream AND x.term > since AND w.version > since;
END
$$;
COMMENT ON FUNCTION writer_look(text, bigint) IS 'Members, and slots that changed hands, at one moment';
