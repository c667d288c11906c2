-- Why the ids of streams may be rows of another table now, or NULL: what a function of ours in the schema {home} says of each.
-- $1 integer[]: numbers of streams.
SELECT w.number, {home}.stream_strayed(w.number) AS reason
FROM unnest($1::integer[]) AS w (number)
