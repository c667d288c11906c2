-- The age counts back from the server's clock.
SELECT {schema}.stream_position_at($1, clock_timestamp() - $2::interval)
