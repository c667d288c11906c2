SELECT {schema}.stream_ack_note($1, $2::integer[], $3, $4)
