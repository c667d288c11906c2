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

-- tube_short_sql(tube, partitions): the statement, to be prepared, that reads the next pods of one of the tube's own
-- partitions if they are few and small: a row for each, with its priority, seq, number of ids and finished line, regular
-- pods first, each priority by seq. Its parameters: the partition, the term, after_regular, after_backfill, the tube's
-- position, the most pods, the most bytes of their ids and payloads.
-- One row without a pod: there is none; held is false if the term does not hold the partition, or the tube has another
-- number of partitions. No line: there are more pods or bytes. Writes nothing.
--
-- It is for workers that wait: a plan and a COPY for each of their pods would take ten times as long. A prepared
-- statement is not planned again as the tube grows, so it is for sessions without sequential scans and sorts.
CREATE OR REPLACE FUNCTION tube_short_sql(tube text, partitions integer) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format($sql$
        SELECT fence.held, pods.backfill, pods.seq, pods.ids, pods.line
        FROM (
            SELECT EXISTS (SELECT FROM %1$s AS l WHERE l.tube = %3$L AND l.term = $2::bigint
                    AND %4$s %% l.partitions = 0 AND $1::integer %% l.partitions = l.partition)
                AND EXISTS (SELECT FROM %2$s AS r WHERE r.tube = %3$L AND r.partitions = %4$s) AS held
            OFFSET 0
        ) AS fence
        LEFT JOIN LATERAL (
            SELECT taken.backfill, taken.seq, cardinality(taken.ids) AS ids,
                CASE WHEN count(*) OVER () <= $6::integer AND sum(taken.size) OVER () <= $7::integer
                    THEN %5$s END AS line
            FROM (%6$s) AS taken
        ) AS pods ON true
        ORDER BY pods.backfill, pods.seq$sql$,
        tube_relation('tube_lease'), tube_relation('tube_registry'), tube, partitions,
        tube_line_sql(tube, partitions, '$1::integer'),
        (SELECT string_agg(format($sql$(
                SELECT %1$L::boolean AS backfill, seq, op, shard, ids, ts, payload,
                    pg_column_size(ids) + coalesce(pg_column_size(payload), 0) AS size
                FROM %2$s
                WHERE fence.held AND (shard %% %3$s) = $1::integer AND (op = 'B')::integer = %4$s
                    AND seq > greatest(%5$s::bigint, (SELECT low.seq FROM %7$s AS low WHERE low.tube = %8$L
                        AND low.partitions = %3$s AND low.partition = $1::integer AND low.backfill = %1$L
                        AND low.seq <= $5::bigint)) AND seq <= $5::bigint%6$s
                ORDER BY seq LIMIT $6::integer + 1)$sql$,
            halves.backfill, tube_relation(tube), partitions, halves.backfill::integer, halves.after,
            CASE WHEN halves.backfill THEN ' AND ' || tube_served_sql() END, tube_relation('tube_low'), tube),
            ' UNION ALL ' ORDER BY halves.backfill)
        FROM (VALUES (false, '$3'), (true, '$4')) AS halves (backfill, after)))
$$;
