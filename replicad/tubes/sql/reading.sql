-- How the pods of a partition are read: from its low-water mark on, and as lines.

-- tube_served_sql(): the condition that leaves out the pods for the backfiller. Writes nothing.
CREATE OR REPLACE FUNCTION tube_served_sql() RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT '(cardinality(ids) > 0 OR payload ->> ''type'' IS DISTINCT FROM ''backfill_schedule'')'
$$;

-- tube_range_sql(t, partitions, partition, backfill, after, upto, pods, served): the query of a partition's pods of one
-- priority with after < seq <= upto, by seq, at most pods of them (NULL: no limit). served leaves out the control pods
-- backfill_schedule, which are for the backfiller. It begins behind the low-water mark (tube_low). Writes nothing.
--
-- The tube's index serves its own number of partitions. A larger partition that consists of up to 64 of them (mostly
-- 0/1) is read as their union. A range of another number of partitions, planned before a change, uses the primary key.
CREATE OR REPLACE FUNCTION tube_range_sql(
    t tube_registry, partitions integer, partition integer, backfill boolean,
    after bigint = 0, upto bigint = 9223372036854775807, pods bigint = NULL, served boolean = false
) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN count(*) = 1 THEN min(part.query)
        ELSE format('SELECT * FROM (%s) AS pods ORDER BY seq%s',
            string_agg(format('(%s)', part.query), ' UNION ALL ' ORDER BY part.p), ' LIMIT ' || pods) END
    FROM (
        SELECT numbered.p, format(
            'SELECT * FROM %s WHERE (shard %% %s) = %s AND (op = ''B'')::integer = %s'
            ' AND seq > %s AND seq <= %s%s ORDER BY seq%s',
            tube_relation(t.tube), numbered.n, numbered.p, $4::integer, greatest(after, low.seq), upto,
            CASE WHEN served AND $4 THEN ' AND ' || tube_served_sql() END, ' LIMIT ' || pods) AS query
        FROM (
            SELECT t.partitions AS n, p
            FROM generate_series(partition, t.partitions - 1, partitions) AS p
            WHERE t.partitions % partitions = 0 AND t.partitions / partitions <= 64
            UNION ALL
            SELECT partitions, partition WHERE t.partitions % partitions <> 0 OR t.partitions / partitions > 64
        ) AS numbered
        LEFT JOIN tube_low AS low ON low.tube = t.tube AND low.partitions = numbered.n AND low.partition = numbered.p
            AND low.backfill = $4 AND low.seq <= $6  -- a mark above the position: the sequence was set back
    ) AS part
$$;

-- tube_check_partition(partitions, partition): raises RT005 unless 0 <= partition < partitions <= 32768. Writes
-- nothing.
CREATE OR REPLACE FUNCTION tube_check_partition(partitions integer, partition integer) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path FROM CURRENT AS $$
BEGIN
    IF (partitions BETWEEN 1 AND 32768 AND partition BETWEEN 0 AND partitions - 1) IS NOT TRUE THEN
        PERFORM tube_refuse('RT005', format('%s/%s is no partition', partition, partitions),
            'a partition is written 0/2, 1/2: counted from 0, below their number');
    END IF;
END
$$;

-- tube_check_partitions(tube, partitions): true; raises RT003 if the tube has another number of partitions, RT001 if
-- there is no such tube. Writes nothing.
CREATE OR REPLACE FUNCTION tube_check_partitions(tube text, partitions integer) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    present integer := (tube_find(tube)).partitions;
BEGIN
    IF present IS DISTINCT FROM partitions THEN
        PERFORM tube_refuse('RT003', format('tube %L has %s partitions and not %s', tube, present, partitions),
            format('go on with %s partitions', present));
    END IF;
    RETURN true;
END
$$;

-- tube_low_of(tube, partitions, partition, backfill, upto): the low-water mark of a partition's pods of one priority; 0 if
-- there is none. A mark above upto, the tube's position, is not believed: the sequence was set back. Writes nothing.
CREATE OR REPLACE FUNCTION tube_low_of(
    tube text, partitions integer, partition integer, backfill boolean, upto bigint = 9223372036854775807
) RETURNS bigint
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT coalesce(max(l.seq), 0) FROM tube_low l
    WHERE (l.tube, l.partitions, l.partition, l.backfill) = ($1, $2, $3, $4) AND l.seq <= $5
$$;

-- tube_low_raise(tube, partitions, partition, upto, in_generation): moves the low-water marks of a partition to just below its first
-- pods, but not above upto, which is the tube's position: no pod can appear at or below it. The marks of the tube's own
-- partitions that lie in it are moved too. A mark that would move by less than a thousand stays. Does nothing if there
-- is no such tube, or for a partition that consists of more than 64. Raises RT005, and RT002 unless in_generation, in which
-- the position was read, is the present one (NULL: it is). Writes tube_low.
CREATE OR REPLACE FUNCTION tube_low_raise(
    tube text, partitions integer, partition integer, upto bigint, in_generation text = NULL
) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry;
    own record;
    first_left bigint;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_generation_check(coalesce(in_generation, tube_generation_valid()));
    SELECT * INTO t FROM tube_registry r WHERE r.tube = tube_low_raise.tube;
    IF NOT FOUND OR t.partitions % partitions <> 0 OR t.partitions / partitions > 64 THEN
        RETURN;
    END IF;
    FOR own IN SELECT p, backfill
        FROM generate_series(partition, t.partitions - 1, partitions) AS p, (VALUES (false), (true)) AS kinds (backfill)
        ORDER BY p, backfill  -- two who raise the same marks do it in the same order
    LOOP
        EXECUTE format('SELECT min(seq) FROM (%s) AS oldest',
            tube_range_sql(t, t.partitions, own.p, own.backfill, upto => upto, pods => 1)) INTO first_left;
        PERFORM tube_low_put(t.tube, t.partitions, own.p, own.backfill, coalesce(first_left - 1, upto));
    END LOOP;
    IF partitions <> t.partitions THEN
        PERFORM tube_low_put(t.tube, partitions, partition, k.backfill, k.seq) FROM (
            SELECT kinds.backfill, min(tube_low_of(t.tube, t.partitions, p, kinds.backfill)) AS seq
            FROM generate_series(partition, t.partitions - 1, partitions) AS p, (VALUES (false), (true)) AS kinds (backfill)
            GROUP BY 1 ORDER BY 1) AS k;
    END IF;
END
$$;

-- tube_low_put(tube, partitions, partition, backfill, seq): sets a mark, if it moves by a thousand at least. Writes
-- tube_low.
CREATE OR REPLACE FUNCTION tube_low_put(tube text, partitions integer, partition integer, backfill boolean, seq bigint)
RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    INSERT INTO tube_low AS l VALUES ($1, $2, $3, $4, $5)
    ON CONFLICT ON CONSTRAINT tube_low_pkey DO UPDATE SET seq = excluded.seq WHERE excluded.seq >= l.seq + 1000
$$;

-- tube_pods_sql(tube, partitions, partition, exclude_backfill): the query that reads one partition: regular pods by
-- seq, then, unless they are excluded, backfill pods by seq. A LIMIT may be appended. The query raises RT003 if the
-- number of partitions has changed when it runs. Raises RT001, RT003, RT005. Writes nothing.
--
-- The query is correct for a single reader that deletes the pods that it has read. A reader that uses a cursor must not
-- read beyond the tube's position: it would miss pods of transactions that commit late (see tube_plan).
CREATE OR REPLACE FUNCTION tube_pods_sql(
    tube text, partitions integer, partition integer, exclude_backfill boolean = false
) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_find(tube);
    statement text;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_check_partitions(tube, partitions);
    -- The check in each half is not parallel safe, and must not be: parallel workers would mix the halves.
    SELECT string_agg(format(
            'SELECT seq, op, shard, ids, payload, ts FROM (%s) AS half WHERE %I.tube_check_partitions(%L, %s)',
            tube_range_sql(t, partitions, partition, backfill), current_schema(), tube, partitions),
            ' UNION ALL ' ORDER BY backfill)
        INTO statement
        FROM (VALUES (false), (true)) AS halves (backfill) WHERE NOT (backfill AND exclude_backfill);
    RETURN statement;
END
$$;
COMMENT ON FUNCTION tube_pods_sql(text, integer, integer, boolean) IS 'The query that reads one partition of a tube';

-- tube_plan(tube, partitions, partition, term, after_regular, after_backfill, upto, max_pods, max_ids, max_backfill,
-- in_generation):
-- how far a reader at the cursor (after_regular, after_backfill) gets: the cursor behind the last of its next pods, the
-- number of pods and of ids.
--   upto          the tube's position: no pod can appear at or below it
--   max_pods      at most so many pods
--   max_backfill  at most so many backfill pods among them (NULL: no limit); they come after all regular pods
--   max_ids       about so many ids (NULL: no limit, and ids is NULL): a pod that exceeds it is left out, unless it is
--                 the first
-- Raises RT001, RT002, RT003, RT005, RT006. Writes nothing. It is volatile, so that the snapshot of the pods is taken
-- after the lock on their table: a stable function would find no pod where it waits for a session that rewrites the table.
CREATE OR REPLACE FUNCTION tube_plan(
    tube text, partitions integer, partition integer, term bigint,
    after_regular bigint, after_backfill bigint, upto bigint,
    max_pods integer, max_ids bigint = NULL, max_backfill integer = NULL, in_generation text = NULL,
    OUT regular bigint, OUT backfill bigint, OUT pods integer, OUT ids bigint
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_find(tube);
    half record;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_lease_check(tube, partitions, partition, term, in_generation);
    IF partitions <> 1 THEN
        PERFORM tube_check_partitions(tube, partitions);
    END IF;
    IF greatest(after_regular, after_backfill) > upto THEN
        PERFORM tube_refuse('RT006',
            format('cursor %s.%s lies beyond position %s of tube %L', after_regular, after_backfill, upto, tube),
            'pods below it can still appear, or the database was restored from a backup: read from the start');
    END IF;
    backfill := after_backfill;
    SELECT * INTO half FROM tube_plan_half(
        tube_range_sql(t, partitions, partition, false, after_regular, upto, max_pods), max_ids, 1);
    regular := coalesce(half.last, after_regular);
    pods := half.pods;
    ids := half.ids;
    max_backfill := least(max_backfill, max_pods - pods);
    IF half.cut OR max_backfill <= 0 THEN
        RETURN;
    END IF;
    SELECT * INTO half FROM tube_plan_half(
        tube_range_sql(t, partitions, partition, true, after_backfill, upto, max_backfill, true),
        max_ids - ids, 1 - least(pods, 1));
    backfill := coalesce(half.last, after_backfill);
    pods := pods + half.pods;
    ids := ids + half.ids;
END
$$;

-- tube_plan_half(range, max_ids, at_least): the first pods of a range, by seq, that have at most max_ids ids together,
-- but at least at_least pods: the last seq (NULL: none), the number of pods and (with max_ids) of ids, and whether
-- max_ids left pods out. Writes nothing.
CREATE OR REPLACE FUNCTION tube_plan_half(
    range text, max_ids bigint, at_least integer, OUT last bigint, OUT pods integer, OUT ids bigint, OUT cut boolean
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF max_ids IS NULL THEN
        EXECUTE format('SELECT max(seq), count(*), false FROM (%s) AS range', range) INTO last, pods, cut;
    ELSE
        EXECUTE format('SELECT max(seq) FILTER (WHERE fits), count(*) FILTER (WHERE fits),'
            ' coalesce(max(upto) FILTER (WHERE fits), 0), count(*) FILTER (WHERE fits) < count(*)'
            ' FROM (SELECT seq, upto, upto <= $1 OR n <= $2 AS fits FROM (SELECT seq, row_number() OVER w AS n,'
            ' sum(cardinality(ids)) OVER w AS upto FROM (%s) AS range WINDOW w AS (ORDER BY seq)) AS counted'
            ') AS judged', range)
            INTO last, pods, ids, cut USING max_ids, at_least;
    END IF;
END
$$;

-- tube_line_sql(tube, partitions, partition): the expression for the line of a pod. partition is an expression. Writes
-- nothing.
--
-- concat builds a line twice as fast as ||. jsonb would parse each row and render it again.
CREATE OR REPLACE FUNCTION tube_line_sql(tube text, partitions integer, partition text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT format($sql$concat(%L, %s, %L, seq, ' {"seq":', seq, ',"op":"', op, '","shard":', shard,
        ',"ids":', array_to_json(ids),
        ',"ts":"', to_char(ts AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), '+00:00"',
        ',"payload":' || payload::text, '}')$sql$,
        format('RDATA tube:%s ', tube), partition, format('/%s ', partitions))
$$;

-- tube_lines_sql(tube, partitions, partition, term, after_regular, after_backfill, upto_regular, upto_backfill): the
-- statement, for COPY, that returns finished lines for the partition's pods in (after, upto]: regular pods by seq, then
-- backfill pods by seq:
--   RDATA tube:<tube> <p>/<n> <seq> {"seq":1,"op":"U","shard":3,"ids":[1,2],"ts":"2026-01-01T00:00:00.000000+00:00"}
-- and "payload" last if there is one. The statement raises RT002 if term does not hold the partition when it runs. The
-- range may be older than the tube's number of partitions. Raises RT001, RT005. Writes nothing.
--
CREATE OR REPLACE FUNCTION tube_lines_sql(
    tube text, partitions integer, partition integer, term bigint,
    after_regular bigint, after_backfill bigint, upto_regular bigint, upto_backfill bigint
) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_find(tube);
    fence text := format('%I.tube_lease_check(%L, %s, %s, %s)', current_schema(), tube, partitions, partition, term);
    statement text;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    SELECT string_agg(format('SELECT %s AS line FROM (%s) AS half WHERE %s',
            tube_line_sql(tube, partitions, partition::text),
            tube_range_sql(t, partitions, partition, halves.backfill, halves.after, halves.upto, NULL, true), fence),
            ' UNION ALL ' ORDER BY halves.backfill)
        INTO statement
        FROM (VALUES (false, after_regular, upto_regular), (true, after_backfill, upto_backfill))
            AS halves (backfill, after, upto)
        WHERE halves.after < halves.upto;
    RETURN coalesce(statement,
        format('SELECT NULL::text AS line FROM (SELECT %s AS held OFFSET 0) AS fence WHERE NOT held', fence));
END
$$;

-- tube_short_sql(tube, partitions, many): the statement, to be prepared, that reads the next pods of a partition of the tube
-- if they are few and small: a row for each, with the number of its read (1), its priority, seq, number of ids and finished
-- line, regular pods first, each priority by seq. Its parameters: the partition, the term, after_regular, after_backfill, the
-- tube's position, the most pods, the most bytes of their ids and payloads, the generation in which the position was read. One
-- row without a pod: there is none; held is false if the term does not hold the partition, or the tube has another number of
-- partitions. No line: there are more pods or bytes. With many, it makes several reads, which have numbers from 1: the first
-- six parameters are arrays with an element for each. Writes nothing.
--
-- It is for workers that wait: a plan and a COPY for each of their pods would take ten times as long. Sixteen reads in one
-- statement take as long as three alone, and one takes a sixth longer than alone. A prepared statement is not planned again
-- as the tube grows, so it is for sessions without sequential scans and sorts.
CREATE OR REPLACE FUNCTION tube_short_sql(tube text, partitions integer, many boolean = false) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format($sql$
        SELECT %8$s AS n, fence.held, pods.backfill, pods.seq, pods.ids, pods.line
        FROM %9$s (
            SELECT EXISTS (SELECT FROM %1$s AS l WHERE l.tube = %3$L AND l.term = %10$s
                    AND l.generation = %7$s AND l.generation = coalesce($8::text, l.generation)
                    AND %4$s %% l.partitions = 0 AND %11$s %% l.partitions = l.partition)
                AND EXISTS (SELECT FROM %2$s AS r WHERE r.tube = %3$L AND r.partitions = %4$s) AS held
            OFFSET 0
        ) AS fence
        LEFT JOIN LATERAL (
            SELECT taken.backfill, taken.seq, cardinality(taken.ids) AS ids,
                CASE WHEN count(*) OVER () <= %12$s AND sum(taken.size) OVER () <= $7::integer
                    THEN %5$s END AS line
            FROM (%6$s) AS taken
        ) AS pods ON true
        ORDER BY 1, pods.backfill, pods.seq$sql$,
        tube_relation('tube_lease'), tube_relation('tube_registry'), tube, partitions,
        tube_line_sql(tube, partitions, asked.partition),
        (SELECT string_agg(format($sql$(
                SELECT %1$L::boolean AS backfill, seq, op, shard, ids, ts, payload,
                    pg_column_size(ids) + coalesce(pg_column_size(payload), 0) AS size
                FROM %2$s
                WHERE fence.held AND (shard %% %3$s) = %10$s AND (op = 'B')::integer = %4$s
                    AND seq > greatest(%5$s, (SELECT low.seq FROM %7$s AS low WHERE low.tube = %8$L
                        AND low.partitions = %3$s AND low.partition = %10$s AND low.backfill = %1$L
                        AND low.seq <= %9$s)) AND seq <= %9$s%6$s
                ORDER BY seq LIMIT %11$s + 1)$sql$,
            halves.backfill, tube_relation(tube), partitions, halves.backfill::integer, halves.after,
            CASE WHEN halves.backfill THEN ' AND ' || tube_served_sql() END, tube_relation('tube_low'), tube,
            asked.upto, asked.partition, asked.pods),
            ' UNION ALL ' ORDER BY halves.backfill)
        FROM (VALUES (false, asked.after_regular), (true, asked.after_backfill)) AS halves (backfill, after)),
        tube_generation_sql(), asked.n, asked.source, asked.term, asked.partition, asked.pods)
    FROM (VALUES
        (false, '1', '', '$1::integer', '$2::bigint', '$3::bigint', '$4::bigint', '$5::bigint', '$6::integer'),
        (true, 'asked.n',
            'unnest($1::integer[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::integer[]) WITH ORDINALITY'
            ' AS asked (partition, term, after_regular, after_backfill, upto, pods, n) CROSS JOIN LATERAL',
            'asked.partition', 'asked.term', 'asked.after_regular', 'asked.after_backfill', 'asked.upto', 'asked.pods')
    ) AS asked (many, n, source, partition, term, after_regular, after_backfill, upto, pods)
    WHERE asked.many = tube_short_sql.many
$$;

-- tube_early_sql(tube, partitions): the statement, to be prepared, that reads pods of a partition of the tube above its
-- position: a row for each with its seq and finished line, regular pods first, each priority by seq. Its parameters: the
-- partition, the term, the position, seqs to leave out, the most pods, whether to read backfill pods, the generation. One
-- row without a pod: there is none. No row: the term does not hold the partition, or the tube has another number of
-- partitions. Writes nothing.
--
-- Above the position a pod with a lower seq can still appear, so a cursor must not move over these pods: their reader
-- keeps their seqs. Control pods are left out, because they say that the pods before them were read.
CREATE OR REPLACE FUNCTION tube_early_sql(tube text, partitions integer) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format($sql$
        SELECT pods.backfill, pods.seq, %5$s AS line
        FROM (
            SELECT FROM %1$s AS l WHERE l.tube = %3$L AND l.term = $2::bigint
                AND l.generation = %7$s AND l.generation = coalesce($7::text, l.generation)
                AND %4$s %% l.partitions = 0 AND $1::integer %% l.partitions = l.partition
                AND EXISTS (SELECT FROM %2$s AS r WHERE r.tube = %3$L AND r.partitions = %4$s)
        ) AS fence
        LEFT JOIN LATERAL (%6$s LIMIT $5::integer) AS pods ON true
        ORDER BY pods.backfill, pods.seq$sql$,
        tube_relation('tube_lease'), tube_relation('tube_registry'), tube, partitions,
        tube_line_sql(tube, partitions, '$1::integer'),
        (SELECT string_agg(format($sql$(
                SELECT %1$L::boolean AS backfill, seq, op, shard, ids, ts, payload
                FROM %2$s
                WHERE (shard %% %3$s) = $1::integer AND (op = 'B')::integer = %4$s AND seq > $3::bigint
                    AND cardinality(ids) > 0 AND seq <> ALL ($4::bigint[])%5$s
                ORDER BY seq LIMIT $5::integer)$sql$,
            half.backfill, tube_relation(tube), partitions, half.backfill::integer,
            CASE WHEN half.backfill THEN ' AND $6::boolean' END),
            ' UNION ALL ' ORDER BY half.backfill)
        FROM (VALUES (false), (true)) AS half (backfill)),
        tube_generation_sql())
$$;

-- tube_columns_sql(tube, partitions, partition, term, backfill, after, upto, payload): the statement that returns the
-- next pods of one priority in (after, upto] with seq > $1, by seq, packed into columns: up to 16 rows of at most $2
-- pods each, and no row if there is no pod.
--   pods    the number of pods
--   last    the seq of the last pod
--   fixed   28 bytes of each pod: seq (8), shard (4), number of ids (4), microseconds since 2000 (8), op (4, code point)
--   ids     the ids of all pods: the length (4 bytes), which is 8 for ids of kind bigint, and the id. A NULL has length -1
--           and no id
-- If the tube has keys of kind text, there is a column texts, which is true. With payload there are two more columns. A row ends with the pod with which its payloads exceed $3 bytes:
--   sizes   4 bytes of each pod: the length of its payload's text in UTF-8, -1 without payload
--   bodies  those texts, concatenated; NULL if there are none. A row in which they are longer than $3 is the last
-- All numbers are big-endian. The statement raises RT002 if term does not hold the partition when it runs. The range
-- may be older than the tube's number of partitions. Raises RT001, RT005. Writes nothing.
--
-- ids of kind bigint are stored PLAIN, so the ids of a pod fit into a page, and $2 bounds a row; the size of payloads has no bound. There
-- are few and wide aggregates, because each costs a call per pod. Rows have less than 64 kB: with rows of 1 MB the
-- statement takes nearly twice as long, because malloc returns memory to the system and gets it again four times a row.
CREATE OR REPLACE FUNCTION tube_columns_sql(
    tube text, partitions integer, partition integer, term bigint,
    backfill boolean, after bigint, upto bigint, payload boolean = false
) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_find(tube);
    range text;
    columns text := 'count(*)::integer AS pods, max(seq) AS last,'
        ' string_agg(int8send(seq) || int4send(shard) || int4send(cardinality(ids)) || timestamptz_send(ts)'
        ' || int4send(ascii(op)), '''') AS fixed, string_agg(substring(array_send(ids) FROM 21), '''') AS ids';
    source text := 'SELECT * FROM (%2$s) AS half WHERE seq > %%s LIMIT $2';
    fence text := format('%I.tube_lease_check(%L, %s, %s, %s)', current_schema(), tube, partitions, partition, term);
    piece text;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    range := tube_range_sql(t, partitions, partition, backfill, after, upto, NULL, true);
    IF t.keys = 'text' THEN
        columns := columns || ', true AS texts';
    END IF;
    IF payload THEN
        columns := columns || ', string_agg(int4send(coalesce(octet_length(body), -1)), '''') AS sizes,'
            ' string_agg(body, '''') AS bodies';
        source := 'SELECT * FROM (SELECT texts.*, sum('
            || CASE t.keys WHEN 'bigint' THEN '12 * cardinality(ids)' ELSE 'pg_column_size(ids)' END
            || ' + coalesce(octet_length(body), 0)) OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before'
            ' FROM (SELECT half.*, convert_to(half.payload::text, ''UTF8'') AS body FROM (' || source || ') AS half'
            ') AS texts) AS measured WHERE coalesce(before, 0) < $3';
    END IF;
    piece := format('SELECT %1$s FROM (' || source || ') AS pods', columns, replace(range, '%', '%%'));
    RETURN format(
        'WITH RECURSIVE piece AS ('
        'SELECT 1 AS step, first.* FROM (%s WHERE %s) AS first'
        ' UNION ALL SELECT piece.step + 1, next.* FROM piece, LATERAL (%s) AS next'
        ' WHERE piece.last < %s AND piece.step < 16%s'
        ') SELECT * FROM piece WHERE pods > 0',
        format(piece, '$1'), fence, format(piece, 'piece.last'), upto,
        CASE WHEN payload THEN ' AND coalesce(octet_length(piece.bodies), 0) <= $3' END);
END
$$;
