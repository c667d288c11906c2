-- stream_notes(s): what is worth knowing about a stream that works; nothing where all is plain.
CREATE OR REPLACE FUNCTION stream_notes(s stream) RETURNS text[]
LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(note ORDER BY place), '{}') FROM (
        SELECT 1 AS place, format('sequence %s also feeds %s: this stream''s ids have gaps, and its position moves with '
            'writes to the other', s.sequence, string_agg(DISTINCT format('%s.%I', f.adrelid::regclass, a.attname), ', ')
        ) AS note
        FROM pg_depend d JOIN pg_attrdef f ON f.oid = d.objid
        JOIN pg_attribute a ON a.attrelid = f.adrelid AND a.attnum = f.adnum
        WHERE d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = s.sequence
            AND NOT (f.adrelid IN (SELECT stream_tables(s.relation)) AND a.attname = s.id_column)
        HAVING count(*) > 0
        UNION ALL
        SELECT 2, format('column %I may be NULL: such rows are never sent', s.id_column)
        FROM pg_attribute a WHERE a.attrelid = s.relation AND a.attname = s.id_column AND NOT a.attnotnull
        UNION ALL
        SELECT 3, format('rows without %I are sent as those of master', s.instance_column)
        FROM pg_attribute a WHERE a.attrelid = s.relation AND a.attname = s.instance_column AND NOT a.attnotnull
        UNION ALL
        SELECT 4, stream_hidden(s.relation) || '; until then no row is sent' WHERE stream_hidden(s.relation) IS NOT NULL
        UNION ALL
        SELECT 5, 'the row expression yields text, which is checked row by row; jsonb or json is faster'
        WHERE s.row_type = 'text'
        UNION ALL
        SELECT 6, format('the default of %I does not draw from %s: with lock_watch the transaction that inserts '
            'must call nextval; for ids taken in another one use the method reservation', s.id_column, s.sequence)
        WHERE s.method = 'lock_watch' AND stream_sequence(s.relation, s.id_column) IS DISTINCT FROM s.sequence
        UNION ALL
        SELECT 9, format('sequence %s has INCREMENT BY %s: where programs take ids from it themselves and keep those between '
            'two steps for later, use a column of its own (docs/positions.md, "Ids that programs make")', s.sequence,
            q.seqincrement)
        FROM pg_sequence q WHERE s.method = 'lock_watch' AND q.seqrelid = s.sequence AND q.seqincrement > 1
        UNION ALL
        SELECT 10, format('there is no %s any more: its table is called %s now, and the stream goes on with it; to note the '
            'new name, run: replicad streams alter %s --table %s', format('%I.%I', s.relation_named[1], s.relation_named[2]),
            s.relation, stream_shell(s.name), stream_shell(s.relation::text))
        WHERE s.relation_named IS NOT NULL AND stream_bearer(s.relation_named) IS NULL
        UNION ALL
        SELECT 7, format('writers take their ids from %I.stream_next(%L); an id that is not reserved is refused',
            current_schema(), s.name)
        WHERE s.method = 'reservation'
        UNION ALL
        SELECT 8, 'an UPDATE that moves a row to another partition inserts it there, so it needs a new id from stream_next'
        FROM pg_class c WHERE s.method = 'reservation' AND c.oid = s.relation AND c.relkind = 'p'
    ) notes
$$;
