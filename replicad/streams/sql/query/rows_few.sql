-- A few rows of a stream as finished lines in one value; within is rows_copy. `more`: they are too many bytes for that (the
-- caller then copies them). Without ORDER BY, window and aggregate take the lines in the order of the query within.
SELECT
    string_agg(convert_to(counted.line, 'UTF8') || '\x0a'::bytea, ''::bytea) FILTER (WHERE counted.total <= {most}) AS data,
    coalesce(max(counted.total) > {most}, FALSE) AS more
FROM (
    SELECT lines.line, sum(octet_length(lines.line)) OVER (ROWS UNBOUNDED PRECEDING) AS total
    FROM ({lines}) AS lines (line)
) AS counted
