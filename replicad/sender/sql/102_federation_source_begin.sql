-- federation_source_begin(source, stream, token): where nothing was recorded of a stream yet, all senders of the source
-- begin behind `token`; the first one's word counts. Writes federation_sender.
CREATE OR REPLACE FUNCTION federation_source_begin(source text, stream text, token bigint) RETURNS void
LANGUAGE sql AS $$
    UPDATE federation_sender s SET token = federation_source_begin.token
    WHERE s.source = federation_source_begin.source AND s.stream = federation_source_begin.stream
        AND s.token IS NULL
$$;
