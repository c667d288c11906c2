-- stream_ack_forget(name, instance): a sender that will not come back holds nothing back any more. Returns whether it was
-- known by an ack. Raises RS001. Writes stream_ack.
CREATE OR REPLACE FUNCTION stream_ack_forget(name text, instance text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    DELETE FROM stream_ack a WHERE a.stream = s.number AND a.instance = stream_ack_forget.instance;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION stream_ack_forget(text, text) IS 'Forgets a sender that will not come back';
