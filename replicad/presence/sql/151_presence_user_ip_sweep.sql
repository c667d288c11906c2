-- presence_user_ip_sweep(batch): removes up to `batch` of what is older than the settings say. Returns how many they
-- were. Writes presence_user_ip.
CREATE OR REPLACE FUNCTION presence_user_ip_sweep(batch integer) RETURNS bigint
LANGUAGE sql AS $$
    WITH old AS (
        SELECT i.key FROM presence_user_ip i
        WHERE i.stored_at < clock_timestamp() - (SELECT s.ip_retention FROM presence_setting s)
        ORDER BY i.stored_at LIMIT batch FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM presence_user_ip i USING old WHERE i.key = old.key RETURNING 1
    )
    SELECT count(*) FROM gone
$$;
