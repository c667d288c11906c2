-- stream_refuse(problem, remedy): raises RS002 unless the problem is NULL.
CREATE OR REPLACE FUNCTION stream_refuse(problem text, remedy text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'RS002', MESSAGE = problem, HINT = remedy;
    END IF;
END
$$;

-- stream_refuse_argument(problem, remedy): raises RS007: no database would take this value.
CREATE OR REPLACE FUNCTION stream_refuse_argument(problem text, remedy text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'RS007', MESSAGE = problem, HINT = remedy;
END
$$;
