-- writer_disable(stream): the keys are nobody's; writers that still share them are refused from now on. Raises RS001,
-- RS002. Writes writer_sharding, and what hangs on it.
CREATE OR REPLACE FUNCTION writer_disable(stream text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    found_sharding writer_sharding := writer_find(stream);
BEGIN
    DELETE FROM writer_sharding w WHERE w.stream = found_sharding.stream;
END
$$;
COMMENT ON FUNCTION writer_disable(text) IS 'Ends the sharing of a stream''s keys';
