-- The lowest id of a stream's table; NULL where it is empty.
SELECT min(t.{id})::bigint AS lowest FROM {table} AS t
