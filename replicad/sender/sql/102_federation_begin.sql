-- federation_begin(stream, token): where nothing was recorded of a stream yet, all senders begin behind `token`; the
-- first one's word counts. Writes federation_sender.
CREATE OR REPLACE FUNCTION federation_begin(stream text, token bigint) RETURNS void
LANGUAGE sql AS $$
    UPDATE federation_sender s SET token = federation_begin.token
    WHERE s.stream = federation_begin.stream AND s.token IS NULL
$$;
COMMENT ON FUNCTION federation_begin(text, bigint) IS 'Where all senders begin with a stream';
-- federation_follow(sender, stream, epoch): what this sender has recorded of a stream is, all of it, of the generation
-- `epoch` too. So it is for senders of which no generation is known. Writes federation_sender.
CREATE OR REPLACE FUNCTION federation_follow(sender text, stream text, epoch text) RETURNS void
LANGUAGE sql AS $$
    UPDATE federation_sender s SET epoch = federation_follow.epoch
    WHERE s.stream = federation_follow.stream AND (s.name = federation_follow.sender OR s.epoch IS NULL)
$$;
COMMENT ON FUNCTION federation_follow(text, text, text) IS 'Of which generation a recorded token is';
