-- Has the pauses of destinations ($2) of a source ($1) end in $3 seconds.
UPDATE {schema}.federation_destination SET retry_at = clock_timestamp() + make_interval(secs => $3)
WHERE source = $1 AND name = ANY ($2::text[])
