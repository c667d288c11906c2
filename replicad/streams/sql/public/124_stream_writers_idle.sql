-- stream_writers_idle(name, since): the writers that are not retired and have no row above the id `since`. Where that is
-- all of them, the first is left out: a stream keeps one. Raises RS001.
CREATE OR REPLACE FUNCTION stream_writers_idle(name text, since bigint, OUT writer text) RETURNS SETOF text
LANGUAGE sql STABLE AS $$
    WITH busy (name) AS MATERIALIZED (
        SELECT stream_writers_last(stream_find(stream_writers_idle.name), since)
    ), active AS (
        SELECT w.number, w.name, EXISTS (SELECT FROM busy b WHERE b.name = w.name) AS busy
        FROM stream_find(stream_writers_idle.name) s
        JOIN stream_writer w ON w.stream = s.number AND w.retired_at IS NULL
    )
    SELECT a.name FROM active a
    WHERE NOT a.busy AND (a.number > (SELECT min(x.number) FROM active x) OR EXISTS (SELECT FROM active x WHERE x.busy))
    ORDER BY a.number
$$;
COMMENT ON FUNCTION stream_writers_idle(text, bigint) IS 'Writers without a row above an id';
