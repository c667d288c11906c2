-- Rights: writers of any role reserve ids and insert under the guard, so they may look streams up and use the functions on
-- that way. Administration is the owner's: a row expression is SQL that the daemon runs. Every function looks its
-- neighbours up in this schema alone, whatever the caller's search_path, except functions that are inlined or called for
-- every row: they need no neighbours, or name them in full. The owner of a table trims it himself.
DO $rights$
DECLARE
    f record;
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO PUBLIC', current_schema());
    GRANT SELECT ON stream, stream_writer, stream_position, stream_generation, stream_changes TO PUBLIC;
    GRANT SELECT (stream, id) ON stream_skip TO PUBLIC;  -- not the reasons, which may quote rows
    FOR f IN SELECT p.oid::regprocedure AS name, p.proname
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = current_schema() AND p.proname ~ '^stream_' AND p.proname !~ '^stream_guard_\d+$'
    LOOP
        IF f.proname NOT IN ('stream_instance', 'stream_json', 'stream_lock_key', 'stream_moved') THEN
            EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', f.name, current_schema());
        END IF;
        IF f.proname IN ('stream_add_changes', 'stream_changes_remove', 'stream_changes_ensure', 'stream_change_function_ensure',
                'stream_change_lines', 'stream_change_truncated', 'stream_changes_look', 'stream_changes_note', 'stream_change_detach', 'stream_snapshot_request',
                'stream_snapshot_step', 'stream_give', 'stream_belong',
                'stream_add', 'stream_remove', 'stream_alter', 'stream_max_row', 'stream_sequence_changed',
                'stream_check', 'stream_check_parts', 'stream_check_row',
                'stream_continue', 'stream_fork', 'stream_generation_add', 'stream_kept_upto',
                'stream_writers_ensure', 'stream_writers_discover', 'stream_writers_retire', 'stream_writers_last',
                'stream_writers_idle', 'stream_writer_holder',
                'stream_reader_ensure', 'stream_readers_ensure', 'stream_as_owner', 'stream_proof_key',
                'stream_guard_attach', 'stream_guard_build', 'stream_guard_detach',
                'stream_keep_rules', 'stream_trimmer_ensure', 'stream_keep_upto', 'stream_trim_kept',
                'stream_note', 'stream_rewind', 'stream_keep', 'stream_mark_position', 'stream_skip_id', 'stream_skip_undo',
                'stream_trouble_write', 'stream_troubles', 'stream_daemon_beat', 'stream_daemon_leave', 'stream_daemons',
                'stream_relay_channel', 'stream_relay_secret') THEN
            EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f.name);
        END IF;
    END LOOP;
    PERFORM stream_guard_build(s) FROM stream s WHERE s.method = 'reservation';  -- by the template of this version
END
$rights$;
