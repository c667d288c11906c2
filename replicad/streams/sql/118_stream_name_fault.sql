-- stream_named(relation): the schema and the name of a relation; NULL where it is gone.
CREATE OR REPLACE FUNCTION stream_named(relation regclass) RETURNS text[]
LANGUAGE sql STABLE AS $$
    SELECT ARRAY[n.nspname::text, c.relname::text]
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation
$$;
-- stream_bearer(named): the relation that has this schema and name now; NULL where there is none.
CREATE OR REPLACE FUNCTION stream_bearer(named text[]) RETURNS regclass
LANGUAGE sql STABLE AS $$
    SELECT c.oid::regclass
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = named[1] AND c.relname = named[2]
$$;
-- stream_fed_elsewhere(sequence, tbl): the tables, apart from tbl with its partitions and heirs, in which a column default
-- draws from the sequence.
CREATE OR REPLACE FUNCTION stream_fed_elsewhere(sequence regclass, tbl regclass) RETURNS SETOF regclass
LANGUAGE sql STABLE AS $$
    SELECT DISTINCT f.adrelid::regclass
    FROM pg_depend d JOIN pg_attrdef f ON f.oid = d.objid
    WHERE d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = sequence
        AND f.adrelid <> tbl AND f.adrelid NOT IN (SELECT t FROM stream_tables(tbl) t)
$$;
-- stream_shell(word): the word as an argument of a command in a shell.
CREATE OR REPLACE FUNCTION stream_shell(word text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN word ~ '^[A-Za-z0-9_./:@%+=-]+$' THEN word ELSE $q$'$q$ || replace(word, $q$'$q$, $q$'\''$q$) || $q$'$q$ END
$$;
-- stream_name_fault(s): rows that users take for rows of the stream may be in another table; NULLs where that is not so.
--  - The name under which the table was added leads to another relation: tables were swapped. A name that leads nowhere is
--    no fault: the table was renamed, and nothing else can be meant.
--  - Likewise the name of a sequence that no column default draws from, and that of the table of positions: writers call
--    them by their names.
--  - The sequence feeds a table that it did not feed when the stream was added: that table is about to take the place of
--    the stream's table, and its ids would pass as gaps. A partition that was detached is no such table.
-- The daemon asks in each poll that moves a position, after it has read the last value (the query horizon_holders).
CREATE OR REPLACE FUNCTION stream_name_fault(s stream, OUT problem text, OUT remedy text)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    bearer regclass := nullif(stream_bearer(s.relation_named), s.relation);
    alter_to text := format('replicad streams alter %s --table ', stream_shell(s.name));
    is_table boolean;
BEGIN
    IF bearer IS NOT NULL THEN
        SELECT c.relkind IN ('r', 'p') INTO is_table FROM pg_class c WHERE c.oid = bearer;
        problem := format('%s is another %s now; the table of the stream is %s', bearer,
            CASE WHEN is_table THEN 'table' ELSE 'relation' END, s.relation);
        remedy := CASE WHEN is_table
            THEN format('to follow the new table, run: %s%s (with --same-rows if it has the rows of the old one); to go on with '
                'the old one, run: %s%s; or rename them back', alter_to, stream_shell(bearer::text), alter_to,
                stream_shell(s.relation::text))
            ELSE format('if writers still write to %s, run: %s%s', s.relation, alter_to, stream_shell(s.relation::text)) END;
        RETURN;
    END IF;
    bearer := CASE WHEN NOT s.fed THEN nullif(stream_bearer(s.sequence_named), s.sequence) END;
    IF bearer IS NOT NULL THEN
        problem := format('%s is another sequence now; the stream follows %s', bearer, s.sequence);
        remedy := format('if writers take ids from the new one, run: %s%s --sequence %s; or rename them back',
            alter_to, stream_shell(s.relation::text), stream_shell(bearer::text));
        RETURN;
    END IF;
    bearer := nullif(stream_bearer(s.positions_named), s.positions);
    IF bearer IS NOT NULL THEN
        problem := format('%s is another relation now; the positions of the stream are in %s', bearer, s.positions);
        remedy := format('if the writers publish in the new one, run: %s%s --positions-table %s; if they publish in the old one, '
            'run: %s%s --positions-table %s; or rename them back', alter_to, stream_shell(s.relation::text),
            stream_shell(bearer::text), alter_to, stream_shell(s.relation::text), stream_shell(s.positions::text));
        RETURN;
    END IF;
    SELECT f INTO bearer FROM stream_fed_elsewhere(s.sequence, s.relation) f WHERE f <> ALL (s.also_feeds) AND f::oid <> ALL (s.parted)
        AND f::oid::text NOT IN (
            SELECT split_part(noted.file, ':', 1) FROM stream_generation g, unnest(string_to_array(g.table_files, ',')) AS noted (file)
            WHERE g.stream = s.number AND g.number = (SELECT max(x.number) FROM stream_generation x WHERE x.stream = s.number))
    ORDER BY f LIMIT 1;
    IF FOUND AND s.relation_named IS NOT NULL THEN
        problem := format('sequence %s feeds %s too since the stream was added, so that ids of the stream may be rows there',
            s.sequence, bearer);
        remedy := format('if it takes the place of %s, run: %s%s (with --same-rows if it has the same rows); if the stream stays '
            'with its table, run: %s%s; or drop the default of the column in %s', s.relation, alter_to,
            stream_shell(bearer::text), alter_to, stream_shell(s.relation::text), bearer);
    END IF;
END
$$;
