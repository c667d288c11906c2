-- Changes that a tube may have missed: after a fork of its history, or while its triggers were off (docs/tubes.md).

-- tube_miss(t, name, first, last, at): touches of the tube above the seq first, and (NULL: or any above it) up to last, are
-- unknown because of a fork; since is when first was noted. Notes it for each attached table, once, and schedules backfills if
-- the tube has on_fork = 'backfill'. Writes tube_missed, and what tube_backfill_request writes.
CREATE OR REPLACE FUNCTION tube_miss(t tube_registry, name text, first bigint, last bigint, at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    a tube_attachment;
BEGIN
    FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
        WHERE x.tube = t.tube AND x.tbl = x.root ORDER BY x.tbl::oid
    LOOP
        INSERT INTO tube_missed AS m (tube, cause, tbl, after, upto, since) VALUES (t.tube, name, a.tbl, first, last, at)
            ON CONFLICT ON CONSTRAINT tube_missed_pkey DO NOTHING;
        IF FOUND AND t.on_fork = 'backfill' THEN
            PERFORM tube_backfill_request(t.tube, NULL, a.shard, a.shard);
        END IF;
        UPDATE tube_missed m SET after = least(m.after, first), upto = greatest(m.upto, last)
            WHERE m.tube = t.tube AND m.cause = name AND m.tbl = a.tbl AND (m.after > first OR m.upto < last);
    END LOOP;
    DELETE FROM tube_missed m WHERE m.tube = t.tube AND m.healed_at < clock_timestamp() - interval '30 days';
END
$$;

-- tube_seen(tube, in_generation, upto): somebody has passed on pods of the tube in that generation, the last of them with the
-- seq upto. If history has forked since, the touches above the shared seq are unknown: their changes are downstream, and may
-- not be in the present tables, or were not made there: tube_miss notes it. Returns the present generation, the shared seq, when that was noted, and the state:
--   same       that is the present generation, or all touches up to upto are shared
--   unknown    the touches in (shared, upto] are unknown; a backfill of each attached table brings the downstream up to date
--   scheduled  the same, and the backfills are scheduled or have begun
--   healed     the tables have been backfilled since the fork
-- mended: whoever remembers in_generation and upto may remember the present generation and this seq instead, because all is
-- well up to there. NULL: the caller must ask again, above all after another fork, which may lose what was noted here.
-- Raises RT001, RT009. Writes what tube_miss writes.
CREATE OR REPLACE FUNCTION tube_seen(
    tube text, in_generation text, upto bigint,
    OUT generation text, OUT shared bigint, OUT since timestamptz, OUT state text, OUT mended bigint
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry;
    first_fork tube_generation;
    name text;
BEGIN
    generation := (tube_continue()).id;
    t := tube_lock(tube);
    shared := tube_shared(t.tube, in_generation);
    state := 'same';
    IF upto <= coalesce(shared, upto) THEN
        mended := upto;
        RETURN;
    END IF;
    -- The first generation in which they are unknown. A backfill after it has mended what later restarts find unknown again.
    SELECT * INTO first_fork FROM tube_generation g
        WHERE g.number > coalesce((SELECT h.number FROM tube_generation h WHERE h.id = in_generation),
                (SELECT max(h.number) FROM tube_generation h) - 1)
            AND coalesce((g.shared ->> t.tube)::bigint, 0) < tube_seen.upto
        ORDER BY g.number LIMIT 1;
    name := 'fork ' || coalesce(first_fork.id, generation);
    since := coalesce(first_fork.shared_at, first_fork.created_at);
    PERFORM tube_miss(t, name, shared, upto, since);
    state := CASE
        WHEN NOT EXISTS (SELECT FROM tube_missed m WHERE m.tube = t.tube AND m.cause = name AND m.healed_at IS NULL) THEN 'healed'
        WHEN t.on_fork = 'backfill' THEN 'scheduled'
        ELSE 'unknown' END;
    mended := CASE WHEN state = 'healed' THEN pg_sequence_last_value('tube_seq') END;
END
$$;

-- tube_on_fork(tube, what): what happens when touches of the tube are unknown after a fork of history: `report`, the state of
-- the tube says so until its tables have been backfilled, or `backfill`: these backfills are scheduled too. Raises RT001,
-- RT008. Writes tube_registry.
CREATE OR REPLACE FUNCTION tube_on_fork(tube text, what text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_lock(tube);
BEGIN
    IF (what IN ('report', 'backfill')) IS NOT TRUE THEN
        PERFORM tube_refuse('RT008', format('%L is nothing that a tube can do after a fork of history', what),
            'give report or backfill');
    END IF;
    UPDATE tube_registry r SET on_fork = what WHERE r.tube = t.tube AND r.on_fork <> what;
END
$$;
COMMENT ON FUNCTION tube_on_fork(text, text) IS 'What happens when touches are unknown after a fork of history: report, or backfill';

-- tube_missing(): the changes that tubes may have missed, that no backfill has brought in yet, and whose cause is over: the
-- tube, the cause, the table, the range of unknown touches of a fork, the time, and the options of the table. Writes nothing.
CREATE OR REPLACE FUNCTION tube_missing() RETURNS TABLE (
    tube text, cause text, tbl text, after bigint, upto bigint, since timestamptz, until timestamptz, shard integer, routed boolean
)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT m.tube, m.cause, tube_qualified(m.tbl::regclass), m.after, m.upto, m.since, m.seen_at, a.shard, a.routing IS NOT NULL
    FROM tube_missed m JOIN tube_attachment a ON a.tube = m.tube AND a.tbl = m.tbl
    WHERE m.healed_at IS NULL AND NOT m.lasts ORDER BY m.tube, m.cause, m.tbl
$$;

-- tube_trigger_marks(of_tube, of_root): the attached tables and partitions (of one tube, of one table; NULL: all) with what
-- identifies the rows of the tube's triggers in pg_trigger, and whether all of them are there and fire. A trigger that is
-- disabled and enabled again has another row. Those that a partition has from its table count for whether they fire. The triggers are looked up table by table, so that one table costs the same
-- whatever the number of attached tables. Writes nothing.
CREATE OR REPLACE FUNCTION tube_trigger_marks(of_tube text, of_root regclass)
RETURNS TABLE (tube text, tbl oid, root oid, marks text, fires boolean)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH chosen AS MATERIALIZED (
        SELECT a.tube, a.tbl, a.root FROM tube_attachment a
        WHERE (of_tube IS NULL OR a.tube = of_tube) AND (of_root IS NULL OR a.root = of_root)
            AND EXISTS (SELECT FROM pg_class c WHERE c.oid = a.tbl)
    ), present AS MATERIALIZED (
        SELECT c.tube, c.tbl, g.* FROM chosen c CROSS JOIN LATERAL (
            SELECT t.oid, t.xmin, t.tgfoid, t.tgargs, t.tgtype, t.tgtype & 1 = 1 AS of_rows, t.tgparentid = 0 AS own,
                t.tgenabled IN ('O', 'A') AND (t.tgqual IS NULL OR t.tgtype & 1 = 1) AS fires
            FROM pg_trigger t WHERE t.tgrelid = c.tbl OFFSET 0
        ) AS g
    ), functions AS MATERIALIZED (
        SELECT p.oid, p.proname IN ('tube_truncate_trigger', 'tube_moves') AS named, d.description
        FROM (SELECT DISTINCT x.tgfoid FROM present x) AS used
            JOIN pg_proc p ON p.oid = used.tgfoid AND p.pronamespace = quote_ident(current_schema())::regnamespace
            LEFT JOIN pg_description d ON d.objoid = p.oid AND d.classoid = 'pg_proc'::regclass AND d.objsubid = 0
    ), marked AS (
        SELECT x.tube, x.tbl, string_agg(x.oid || ':' || x.xmin, ' ' ORDER BY x.oid) FILTER (WHERE x.own) AS marks,
            bit_or(x.tgtype::integer) FILTER (WHERE x.fires AND NOT x.of_rows) AS events,
            count(*) FILTER (WHERE x.fires AND x.of_rows) AS of_rows, bool_or(x.of_rows AND NOT x.fires) AS off
        FROM present x JOIN functions f ON f.oid = x.tgfoid
        WHERE CASE WHEN f.named THEN position(tube_arguments(ARRAY[x.tube]) IN x.tgargs) = 1
            ELSE f.description = 'replicad: touches tube ' || x.tube END
        GROUP BY 1, 2
    )
    SELECT c.tube, c.tbl::oid, c.root::oid, coalesce(m.marks, ''), coalesce(m.events, 0) & 60 = 60 AND m.off IS NOT TRUE
        AND (m.of_rows = 4 OR NOT EXISTS (SELECT FROM pg_class k WHERE k.oid = c.tbl AND k.relkind = 'p'))
    FROM chosen c LEFT JOIN marked m ON m.tube = c.tube AND m.tbl = c.tbl;
END
$$;

-- tube_triggers_check(of_tube, of_root): looks at the triggers of attached tables (of one tube, of one table; NULL: all). Those
-- that are off, or whose rows are others than at the last look, have missed changes, or may have: it notes that until the
-- table has been backfilled. To be called regularly, and before triggers are changed by us. Writes tube_missed and
-- tube_trigger_seen.
CREATE OR REPLACE FUNCTION tube_triggers_check(of_tube text = NULL, of_root regclass = NULL) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    WITH seen AS MATERIALIZED (
        SELECT m.*, s.marks IS NULL AS fresh, s.marks <> m.marks AS changed
        FROM tube_trigger_marks($1, $2) m LEFT JOIN tube_trigger_seen s ON s.tube = m.tube AND s.tbl = m.tbl
    ), stored AS (
        INSERT INTO tube_trigger_seen AS s SELECT m.tube, m.tbl, m.marks FROM seen m WHERE m.fresh OR m.changed
        ON CONFLICT ON CONSTRAINT tube_trigger_seen_pkey DO UPDATE SET marks = excluded.marks
    ), tables AS (
        SELECT m.tube, m.root, bool_or(NOT m.fires) AS off, bool_or(m.changed IS TRUE) AS changed FROM seen m GROUP BY 1, 2
    ), over AS (
        UPDATE tube_missed x SET lasts = false, seen_at = clock_timestamp() FROM tables t
        WHERE x.tube = t.tube AND x.tbl = t.root AND x.cause = 'triggers' AND x.lasts AND NOT t.off
    )
    INSERT INTO tube_missed AS x (tube, cause, tbl, lasts)
    SELECT t.tube, 'triggers', t.root, t.off FROM tables t LEFT JOIN tube_missed x ON x.tube = t.tube AND x.tbl = t.root
        AND x.cause = 'triggers' AND x.healed_at IS NULL
    WHERE (t.off AND x.lasts IS NOT TRUE) OR (t.changed AND NOT t.off AND x.lasts IS NOT TRUE)
    ON CONFLICT ON CONSTRAINT tube_missed_pkey DO UPDATE SET lasts = excluded.lasts, seen_at = clock_timestamp(), healed_at = NULL,
        since = CASE WHEN x.healed_at IS NULL THEN x.since ELSE clock_timestamp() END
$$;

-- tube_triggers_note(of_tube, of_root): the triggers of these tables were changed by us. Writes tube_trigger_seen.
CREATE OR REPLACE FUNCTION tube_triggers_note(of_tube text, of_root regclass = NULL) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    INSERT INTO tube_trigger_seen AS s SELECT m.tube, m.tbl, m.marks FROM tube_trigger_marks($1, $2) m
    ON CONFLICT ON CONSTRAINT tube_trigger_seen_pkey DO UPDATE SET marks = excluded.marks WHERE s.marks <> excluded.marks
$$;

-- tube_partitions_check(of_tube): partitions and heirs that left their attached table (of one tube; NULL: of all), because they were
-- dropped or detached: their rows have gone without touches, so downstreams still have them. It notes that until the table has
-- been backfilled, whose garbage collection finds them. A detached one keeps its triggers, and is attached by itself from then on. To be
-- called regularly, and before attachments of dropped tables are removed. Writes tube_missed and tube_attachment.
CREATE OR REPLACE FUNCTION tube_partitions_check(of_tube text = NULL) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    a tube_attachment;
    own name[];
BEGIN
    FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class r ON r.oid = x.root
        WHERE x.tube = coalesce(of_tube, x.tube) AND x.tbl <> x.root AND NOT EXISTS (
            SELECT FROM pg_inherits i WHERE i.inhrelid = x.tbl AND i.inhparent IN (
                SELECT y.tbl FROM tube_attachment y WHERE y.tube = x.tube AND y.root = x.root))
        ORDER BY x.tube, x.tbl::oid
    LOOP
        PERFORM tube_lock(a.tube);
        SELECT ARRAY[n.nspname, c.relname] INTO own
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = a.tbl;
        IF FOUND THEN
            UPDATE tube_attachment x SET root = x.tbl, given = own WHERE x.tube = a.tube AND x.tbl = a.tbl;
        ELSE
            DELETE FROM tube_attachment x WHERE x.tube = a.tube AND x.tbl = a.tbl;
        END IF;
        INSERT INTO tube_missed AS m (tube, cause, tbl) VALUES (a.tube, 'partitions', a.root)
            ON CONFLICT ON CONSTRAINT tube_missed_pkey DO UPDATE SET seen_at = clock_timestamp(), healed_at = NULL,
                since = CASE WHEN m.healed_at IS NULL THEN m.since ELSE clock_timestamp() END;
    END LOOP;
END
$$;
