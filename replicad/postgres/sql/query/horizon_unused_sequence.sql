-- Where a sequence will begin that has handed out nothing since it was made or restarted ({sequence}: quoted name).
-- To be trusted only where pg_sequence_last_value() was NULL before and is NULL after: no nextval() can have been at work.
SELECT last_value, is_called, tableoid::bigint AS found FROM {sequence}
