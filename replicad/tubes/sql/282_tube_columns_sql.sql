-- tube_columns_sql(tube, partitions, partition, term, backfill, after, upto, payload): the statement that returns the
-- next pods of one priority in (after, upto] with seq > $1, by seq, packed into columns: up to 16 rows of at most $2
-- pods each, and no row if there is no pod.
--   pods    the number of pods
--   last    the seq of the last pod
--   fixed   28 bytes of each pod: seq (8), shard (4), number of ids (4), microseconds since 2000 (8), op (4, code point)
--   ids     the ids of all pods, 12 bytes each: the length, which is 8, and the id. A NULL has length -1 and no id
-- With payload there are two more columns. A row ends with the pod with which its payloads exceed $3 bytes:
--   sizes   4 bytes of each pod: the length of its payload's text in UTF-8, -1 without payload
--   bodies  those texts, concatenated; NULL if there are none. A row in which they are longer than $3 is the last
-- All numbers are big-endian. The statement raises RT002 if term does not hold the partition when it runs. The range
-- may be older than the tube's number of partitions. Raises RT001, RT005. Writes nothing.
--
-- ids are stored PLAIN, so those of a pod fit into a page, and $2 bounds a row; the size of payloads has no bound.
-- There are few and wide aggregates, because each costs a call per pod. Rows have less than 64 kB: with rows of 1 MB
-- the statement takes nearly twice as long, because malloc returns memory to the system and gets it again four times a
-- row.
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
    IF payload THEN
        columns := columns || ', string_agg(int4send(coalesce(octet_length(body), -1)), '''') AS sizes,'
            ' string_agg(body, '''') AS bodies';
        source := 'SELECT * FROM (SELECT texts.*, sum(12 * cardinality(ids) + coalesce(octet_length(body), 0))'
            ' OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before'
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
