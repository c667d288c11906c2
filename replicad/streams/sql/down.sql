-- The guards of reserved streams sit on the users' tables; the readers belong to their owners.
SELECT stream_readers_drop(), ARRAY(SELECT stream_remove(name)::text FROM stream ORDER BY name)
