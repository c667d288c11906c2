-- federation_begin(stream, token): where nothing was recorded of a stream yet, all senders begin behind `token`; the
-- first one's word counts. Writes federation_sender.
CREATE OR REPLACE FUNCTION federation_begin(stream text, token bigint) RETURNS void
LANGUAGE sql AS $$
    UPDATE federation_sender s SET token = federation_begin.token
    WHERE s.stream = federation_begin.stream AND s.token IS NULL
$$;
COMMENT ON FUNCTION federation_begin(text, bigint) IS 'Where all senders begin with a stream';
