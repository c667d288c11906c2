-- writer_refuse(code, message, hint): raises that SQLSTATE. Writes nothing.
CREATE OR REPLACE FUNCTION writer_refuse(code text, message text, hint text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint;
END
$$;
