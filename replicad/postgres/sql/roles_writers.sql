-- Writers insert into tables by rights that they have already. Besides they take ids of the sequence of a stream whose ids are
-- reserved, if they may insert into its table; and they invalidate caches.
DO $writers$
DECLARE
    role text;
    reserved record;
BEGIN
    FOREACH role IN ARRAY {writers} LOOP
        IF to_regclass({stream_table}) IS NOT NULL THEN
            FOR reserved IN EXECUTE 'SELECT s.relation, s.sequence FROM ' || {stream_table} || ' s JOIN pg_class c ON c.oid = s.relation '
                'WHERE s.method = ''reservation'' AND has_any_column_privilege($1, s.relation, ''INSERT'')' USING role
            LOOP
                EXECUTE format('GRANT USAGE ON SEQUENCE %s TO %I', reserved.sequence, role);
            END LOOP;
        END IF;
        IF to_regprocedure({cache_write}) IS NOT NULL THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', to_regprocedure({cache_write}), role);
        END IF;
    END LOOP;
END
$writers$;
