-- stream_json(value): the text itself where it is JSON, else the text as a JSON string: a row that a row expression of
-- type text got wrong must not stop a stream, nor break its readers' parsers.
CREATE OR REPLACE FUNCTION stream_json(value text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
BEGIN
    RETURN value::json::text;
EXCEPTION WHEN data_exception OR statement_too_complex THEN
    RETURN to_json(value)::text;
END
$$;
