-- The stream goes with its table, where streams are still there.
DO $stream$
BEGIN
    IF to_regclass('stream') IS NOT NULL THEN
        PERFORM stream_remove(s.name) FROM stream s WHERE s.relation = to_regclass('presence_stream');
    END IF;
END
$stream$
