-- stream_reader_body(): the body of each reader (postgres/sql/reader_body.sql); see stream_reader_ensure.
CREATE OR REPLACE FUNCTION stream_reader_body() RETURNS text
LANGUAGE sql IMMUTABLE AS $$ SELECT $body$
{reader_body}$body$::text $$;
