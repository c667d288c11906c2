-- writer_owner(stream, key): whose a key is now: its slot, the slot's term, and the writer with its address; both NULL
-- where it is nobody's. True for a moment only: what makes a write safe is writer_owns. Raises RS001, RS002.
-- Writes nothing.
CREATE OR REPLACE FUNCTION writer_owner(
    stream text, key text, OUT slot integer, OUT term bigint, OUT owner text, OUT address text
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    w writer_sharding := writer_find(stream);
BEGIN
    SELECT x.slot, x.term, m.instance, m.address INTO slot, term, owner, address
        FROM writer_slot x
        LEFT JOIN writer_member m ON m.stream = x.stream AND m.instance = x.owner AND m.term < x.term
        WHERE x.stream = w.stream AND x.slot = writer_slot_of(key, w.slots);
END
$$;
COMMENT ON FUNCTION writer_owner(text, text) IS 'Whose a key is, and where to reach that writer';
