-- What the poller must know of a server once per connection.
SELECT
    pg_is_in_recovery() AS standby,
    current_setting('server_version_num')::integer AS version
