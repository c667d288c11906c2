-- Trigger functions of streams of changes check and record with one query, and partitioned tables get triggers for MERGE
-- (stream_change_wanted). The daemon's next look makes them (stream_changes_look); until then they work as they are.
DROP FUNCTION stream_changes_ensure(integer);
DROP FUNCTION stream_change_usual(stream_changes);
UPDATE stream_changes SET marks = NULL;
