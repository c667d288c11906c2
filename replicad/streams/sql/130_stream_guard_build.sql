-- stream_guard_build(s): the trigger function that guards one reserved stream: an id that is inserted, or written by an
-- UPDATE, must be above the bound that its transaction holds. One function per stream, since only then can the id be
-- read without a detour; the condition is in here, for a WHEN clause would be prepared anew for every statement. Writes
-- stream_guard_N(). The installation builds them all anew, so that they follow this template. So the function belongs to
-- the owner of this schema, whoever adds the stream.
CREATE OR REPLACE FUNCTION stream_guard_build(s stream) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = current_schema());
BEGIN
    EXECUTE format($template$
        CREATE OR REPLACE FUNCTION %1$I.stream_guard_%2$s() RETURNS trigger LANGUAGE plpgsql AS $guard$
        DECLARE
            held text := current_setting(%3$L, true);
        BEGIN
            IF split_part(held, ':', 1) = 'p' || pg_current_xact_id()::text AND NEW.%4$I > split_part(held, ':', 2)::bigint THEN
                RETURN NULL;
            END IF;
            IF TG_OP = 'INSERT' OR NEW.%4$I IS DISTINCT FROM OLD.%4$I THEN
                PERFORM %1$I.stream_adopt(%2$s, %3$L, NEW.%4$I, %5$s);
            END IF;
            RETURN NULL;
        END
        $guard$
        $template$, current_schema(), s.number, s.setting, s.id_column,
        CASE WHEN s.instance_column IS NULL THEN '''master'''
            ELSE format('%I.stream_instance(NEW.%I::text)', current_schema(), s.instance_column) END);
    IF keeper !~ '^pg_' AND pg_has_role(keeper, 'MEMBER') THEN
        EXECUTE format('ALTER FUNCTION stream_guard_%s() OWNER TO %I', s.number, keeper);
    END IF;
END
$$;
