-- stream_adopt(number, setting, id, writer): makes this transaction responsible for an id that another session
-- reserved, so that it stays covered until the transaction ends even if that session ends before. Takes a bound below
-- the id first and looks for a certified one afterwards: while one is held, nothing above it was published; from then
-- on our own lock counts. Both must hold back the writer of the row. Called by the guard; a row without an id is never
-- sent and needs no cover. Raises 42501, and RS003 where the id is not covered, or would not be by this session.
CREATE OR REPLACE FUNCTION stream_adopt(number integer, setting text, id bigint, writer text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    xid text := 'p' || pg_current_xact_id()::text;
    me text := current_setting('application_name');
    bound bigint := id - 1;
    covered bigint;
    problem text := 'is not reserved (any more): readers may have passed it';
BEGIN
    IF id IS NULL THEN
        RETURN;
    END IF;
    IF NOT stream_holds_back(number, me, writer) THEN
        problem := format('is of writer %s, and this session is called %s', writer, me);
        bound := NULL;
    ELSIF split_part(current_setting(setting, true), ':', 1) = xid THEN
        -- Ids that come in falling order must not take a lock each: take the bound that covers more of them.
        bound := stream_certified(number, id - 1, writer);
    END IF;
    IF bound IS NOT NULL THEN
        PERFORM stream_prove_or_refuse(s) FROM stream s WHERE s.number = stream_adopt.number;
        PERFORM pg_advisory_xact_lock_shared(stream_lock_key(number, bound));
        covered := stream_certified(number, id - 1, writer);
        IF covered IS NOT NULL THEN
            -- What lies between our bound and theirs may be published already: the other session has moved on.
            PERFORM set_config(setting, xid || ':' || greatest(bound, covered), true);
            RETURN;
        END IF;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'RS003',
        MESSAGE = format('id %s of stream %s %s', id,
            (SELECT s.name FROM stream s WHERE s.number = stream_adopt.number), problem),
        HINT = 'take the id from stream_next() in the transaction that inserts it, or insert it as its writer, before that '
            'completes it';
END
$$;
