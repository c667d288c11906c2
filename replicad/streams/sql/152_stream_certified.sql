-- stream_certified(number, upto, writer): the highest bound up to `upto` that is held with a certificate
-- (stream_reserve) by a session that holds this writer back: one that is called after it, or after no known writer.
-- NULL where there is none.
CREATE OR REPLACE FUNCTION stream_certified(number integer, upto bigint, writer text) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT max(h.bound) FROM stream_held(number) h
    WHERE h.certified AND h.bound <= upto AND stream_holds_back(number, h.session, writer)
$$;
