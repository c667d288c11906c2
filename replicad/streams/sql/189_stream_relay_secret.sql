-- stream_relay_secret(): the key with which daemons sign what they send to each other, as hexadecimal digits. It cannot be found
-- from the name of the channel. Raises an error of rights for every role that may not read stream_relay_key.
CREATE OR REPLACE FUNCTION stream_relay_secret() RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT encode(sha256(convert_to('sign ' || k.key, 'UTF8')), 'hex') FROM stream_relay_key k
$$;
