-- cache_check_right(): raises 42501, with the GRANT, for a role that may not call cache_write. Writes nothing.
CREATE OR REPLACE FUNCTION cache_check_right() RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT has_function_privilege('cache_write(text, jsonb)', 'EXECUTE') THEN
        RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('role %I may not invalidate caches', current_user),
            HINT = format('run `replicad caches grant %1$s`, or: GRANT EXECUTE ON FUNCTION %2$I.cache_write(text, jsonb) TO '
                '%1$I', current_user, current_schema());
    END IF;
END
$$;
