-- presence_user_ip_write(keys, users, ips, devices, agents, tokens, seen): from where users were seen (arrays of one
-- length, no key twice). What is older than what is kept changes nothing. Writes presence_user_ip.
CREATE OR REPLACE FUNCTION presence_user_ip_write(
    keys bytea[], users text[], ips text[], devices text[], agents text[], tokens bytea[], seen bigint[]
) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO presence_user_ip AS held (key, user_id, ip, device_id, user_agent, token_sha256, last_seen, stored_at)
    SELECT n.key, n.user_id, n.ip, n.device, n.agent, n.token, n.seen, clock_timestamp()
    FROM unnest(keys, users, ips, devices, agents, tokens, seen)
        AS n (key, user_id, ip, device, agent, token, seen)
    ORDER BY n.key  -- in one order, so that two daemons do not wait for each other in a circle
    ON CONFLICT (key) DO UPDATE SET token_sha256 = excluded.token_sha256, last_seen = excluded.last_seen,
        stored_at = excluded.stored_at
    WHERE held.last_seen <= excluded.last_seen
$$;
