-- presence_look(): the settings, in seconds, and the fingerprint; no row while presence is not enabled. It is volatile: in a
-- stable function the snapshot is older than the lock, so a table that was restored meanwhile is empty.
CREATE OR REPLACE FUNCTION presence_look(
    OUT grace float8, OUT lost_grace float8, OUT ttl float8, OUT ip_retention float8, OUT fingerprint text
) RETURNS SETOF record
LANGUAGE sql VOLATILE AS $$
    SELECT extract(epoch FROM s.grace)::float8, extract(epoch FROM s.lost_grace)::float8,
        extract(epoch FROM s.ttl)::float8, extract(epoch FROM s.ip_retention)::float8, presence_fingerprint()
    FROM presence_setting s
    WHERE EXISTS (SELECT FROM stream x WHERE x.name = 'presence' AND x.relation = 'presence_stream'::regclass)
$$;
