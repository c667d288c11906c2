-- stream_check_table(tbl): refuses a relation that cannot be a stream's table, its partitions and heirs included.
CREATE OR REPLACE FUNCTION stream_check_table(tbl regclass) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    part record;
BEGIN
    IF tbl IS NULL OR NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = tbl) THEN
        PERFORM stream_refuse('there is no such table', 'name it with its schema, such as public.events');
    END IF;
    FOR part IN SELECT t AS name, c.relkind, c.relpersistence FROM stream_tables(tbl) t JOIN pg_class c ON c.oid = t
    LOOP
        IF part.relkind IN ('v', 'm') THEN
            PERFORM stream_refuse(format('%s is a view', part.name), 'register the table that is written to');
        ELSIF part.relkind = 'f' THEN
            PERFORM stream_refuse(format('%s is a foreign table', part.name),
                'writes on another server cannot be watched from here: register the table where it lives');
        ELSIF part.relkind = 'S' THEN
            PERFORM stream_refuse(format('%s is a sequence', part.name), 'register the table whose ids it gives');
        ELSIF part.relkind NOT IN ('r', 'p') THEN
            PERFORM stream_refuse(format('%s is not a table', part.name), 'register the table that is written to');
        ELSIF part.relpersistence = 't' THEN
            PERFORM stream_refuse(format('%s is temporary: no other session can read it', part.name),
                'use a permanent table');
        ELSIF part.relpersistence <> 'p' THEN
            PERFORM stream_refuse(format('%s is unlogged: a crash empties it', part.name),
                format('run: ALTER TABLE %s SET LOGGED', part.name));
        END IF;
    END LOOP;
END
$$;
