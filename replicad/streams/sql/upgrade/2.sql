-- Trigger functions of streams of changes check and record with one query. The daemon's next look makes them anew
-- (stream_changes_look); until then they work as they are.
DROP FUNCTION stream_change_usual(stream_changes);
UPDATE stream_changes SET marks = NULL;
