-- stream_relay_channel(): the name of the daemons' channel, which cannot be guessed. Raises an error of rights for every
-- role that may not read stream_relay_key.
CREATE OR REPLACE FUNCTION stream_relay_channel() RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT 'replicad.' || left(encode(sha256(convert_to('relay ' || k.key, 'UTF8')), 'hex'), 48) FROM stream_relay_key k
$$;
