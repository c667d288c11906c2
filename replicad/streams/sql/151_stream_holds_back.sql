-- stream_holds_back(number, session, writer): whether what a session of that application_name holds keeps this writer's
-- position back: a session that is called after a known writer holds back that one alone, any other one all of them.
CREATE OR REPLACE FUNCTION stream_holds_back(number integer, session text, writer text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT session = writer OR NOT EXISTS (
        SELECT FROM stream_writer w WHERE w.stream = stream_holds_back.number AND w.name = session)
$$;
