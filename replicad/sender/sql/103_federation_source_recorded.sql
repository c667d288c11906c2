-- federation_source_recorded(sender, stream): up to where every sender of that name has recorded a stream, whatever its
-- source: several may read one stream of updates, and acknowledge it under their common name. NULL: none has begun.
CREATE OR REPLACE FUNCTION federation_source_recorded(sender text, stream text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT min(s.token) FROM federation_sender s
    WHERE s.name = federation_source_recorded.sender AND s.stream = federation_source_recorded.stream
$$;
