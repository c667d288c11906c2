-- stream_skips(name): the ids that were taken out of a stream, ascending: by whom, when and why. Raises RS001.
CREATE OR REPLACE FUNCTION stream_skips(name text) RETURNS SETOF stream_skip
LANGUAGE sql STABLE AS $$
    SELECT k.* FROM stream_find(name) s JOIN stream_skip k ON k.stream = s.number ORDER BY k.id
$$;
COMMENT ON FUNCTION stream_skips(text) IS 'The ids that were taken out of a stream';
