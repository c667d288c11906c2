-- The guards of reserved streams sit on the users' tables.
SELECT stream_remove(name) FROM stream ORDER BY name
