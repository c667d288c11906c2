-- stream_lock_key(number, bound, certified): the key of the shared advisory lock of a reservation. While it is held, an
-- id above the bound may still appear. Bits 48 and up: 0x5200 + the stream's number; below: the bound.
-- The certificate (0x3200 + number) lies beside a session's lock and means nothing to readers; see stream_reserve.
CREATE OR REPLACE FUNCTION stream_lock_key(number integer, bound bigint, certified boolean = false) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT ((CASE WHEN certified THEN 12800 ELSE 20992 END + number)::bigint << 48) | bound
$$;
