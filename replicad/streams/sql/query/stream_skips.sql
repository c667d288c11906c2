SELECT id, reason, skipped_by, skipped_at FROM {schema}.stream_skips($1)
