-- Calls the session by the writer's name, so that what it holds back is that writer alone.
SELECT set_config('application_name', $1, false)
