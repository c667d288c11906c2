SELECT {schema}.stream_relay_channel() AS channel, {schema}.stream_relay_secret() AS secret,
    extract(epoch FROM clock_timestamp())::float8 AS clock
