-- stream_generations(name): the generations of a stream, the present one first: when and why each began, and up to which
-- position its history is shared with the one before. Raises RS001.
CREATE OR REPLACE FUNCTION stream_generations(
    name text, OUT number integer, OUT id text, OUT began_at bigint, OUT reason text, OUT created_at timestamptz
) RETURNS SETOF record
LANGUAGE sql STABLE AS $$
    SELECT g.number, g.id, g.began_at, g.reason, g.created_at
    FROM stream_find(name) s JOIN stream_generation g ON g.stream = s.number ORDER BY g.number DESC
$$;
COMMENT ON FUNCTION stream_generations(text) IS 'The generations of a stream, the present one first';
