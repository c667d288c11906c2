-- tube_columns_sql(tube, partitions, partition, term, backfill, after, upto, payload): the statement that yields the next
-- pods of one priority in (after, upto], by seq, those with seq > $1, packed into columns: up to 16 rows of at most $2
-- pods each, and no row where there is no pod.
--   pods    how many
--   last    the seq of the last
--   fixed   28 bytes of each pod: seq (8), shard (4), number of ids (4), microseconds since 2000 (8), op (4, code point)
--   ids     the ids of all of them, 12 bytes each: the length, which is 8, and the id. A NULL has length -1 and no id
-- and, with payload, of so many pods as have at most $3 bytes before the last of them:
--   sizes   4 bytes of each pod: the length of its payload's text in UTF-8, -1 where there is none
--   bodies  those texts, one behind the other; NULL where there is none. A row in which they are longer is the last
-- All numbers are big-endian. The statement raises RT002 when term does not hold the partition at the time it runs. The
-- range may be older than the tube's number of partitions. Raises RT001, RT005. Writes nothing.
--
-- ids are stored PLAIN, so a pod has no more of them than fit into a page, and $2 bounds a row; payloads have no bound
-- of their own. Few and wide aggregates, since each costs every pod a call, and rows of less than 64 kB: those of a
-- megabyte take nearly twice the time, for memory that malloc gives back to the system and gets anew four times a row.
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
COMMENT ON FUNCTION tube_columns_sql(text, integer, integer, bigint, boolean, bigint, bigint, boolean)
    IS 'The statement that yields a piece of a range of pods as columns';
