-- stream_moved(relations, schemas, names, sequences, feeds): those of the relations whose schema and name lead to another
-- relation now, and those of the sequences from which other column defaults draw than before: `feeds` is the sum of the oids
-- of the defaults. Asked by each poll that moves a position, so it is in plpgsql, which keeps its plans.
CREATE OR REPLACE FUNCTION stream_moved(
    relations oid[], schemas text[], names text[], sequences oid[], feeds bigint[]
) RETURNS oid[]
LANGUAGE plpgsql VOLATILE AS $$  -- what is stable would be tried out while the statement is planned
DECLARE
    moved oid[] := '{}';
    bearer oid;
    found bigint;
BEGIN
    FOR i IN 1 .. cardinality(relations) LOOP  -- one by one: a query over all would be planned anew each time
        SELECT c.oid INTO bearer FROM pg_catalog.pg_class c WHERE c.relname = names[i]::name
            AND c.relnamespace = (SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = schemas[i]::name);
        IF bearer <> relations[i] THEN
            moved := moved || relations[i];
        END IF;
    END LOOP;
    FOR i IN 1 .. cardinality(sequences) LOOP
        SELECT coalesce(sum(d.objid::bigint), 0) INTO found FROM pg_catalog.pg_depend d
            WHERE d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = sequences[i]
                AND d.classid = 'pg_catalog.pg_attrdef'::regclass;
        IF found <> feeds[i] THEN
            moved := moved || sequences[i];
        END IF;
    END LOOP;
    RETURN moved;
END
$$;
