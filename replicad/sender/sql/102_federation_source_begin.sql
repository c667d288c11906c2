-- federation_source_begin(source, stream, token): where nothing was recorded of a stream yet, all senders of the source
-- begin behind `token`; the first one's word counts. Writes federation_sender.
CREATE OR REPLACE FUNCTION federation_source_begin(source text, stream text, token bigint) RETURNS void
LANGUAGE sql AS $$
    UPDATE federation_sender s SET token = federation_source_begin.token
    WHERE s.source = federation_source_begin.source AND s.stream = federation_source_begin.stream
        AND s.token IS NULL
$$;
COMMENT ON FUNCTION federation_source_begin(text, text, bigint) IS 'Where all senders begin with a stream';
-- federation_source_follow(source, sender, stream, epoch): what this sender has recorded of a stream is, all of it, of the generation
-- `epoch` too. So it is for senders of which no generation is known. Writes federation_sender.
CREATE OR REPLACE FUNCTION federation_source_follow(source text, sender text, stream text, epoch text) RETURNS void
LANGUAGE sql AS $$
    UPDATE federation_sender s SET epoch = federation_source_follow.epoch
    WHERE s.source = federation_source_follow.source AND s.stream = federation_source_follow.stream
        AND (s.name = federation_source_follow.sender OR s.epoch IS NULL)
$$;
COMMENT ON FUNCTION federation_source_follow(text, text, text, text) IS 'Of which generation a recorded token is';
