-- stream_refuse(problem, remedy): raises RS002 unless the problem is NULL.
CREATE OR REPLACE FUNCTION stream_refuse(problem text, remedy text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'RS002', MESSAGE = problem, HINT = remedy;
    END IF;
END
$$;
COMMENT ON FUNCTION stream_refuse(text, text) IS 'Raises RS002 with a reason and a remedy';
