-- Streams of changes: their registration and snapshots.

-- name: stream_add_changes
-- The casts: an oid stands for its table, and names that are too long are cut. The search_path is that of this session.
SELECT {schema}.stream_add_changes($1, $2::bigint::oid::regclass, $3::text[]::name[], $4::text[]::name[], $5, $6, $7, $8::text[]::name[], $9)

-- name: stream_changes_same
-- Whether the stream $1 records just these changes: the arguments of stream_add_changes.
SELECT EXISTS (
    SELECT FROM {schema}.stream AS s JOIN {schema}.stream_changes AS c ON c.stream = s.number
    WHERE s.name = $1 AND c.source = $2::bigint::oid AND s.max_row = $9
        AND ($3::text[] IS NULL OR {schema}.stream_columns(c.source, c.key) = $3::name[])
        AND ($4::text[] IS NULL AND c.columns IS NULL
            OR {schema}.stream_columns(c.source, c.columns) @> $4::name[]
            AND $4::name[] || {schema}.stream_columns(c.source, c.key) @> {schema}.stream_columns(c.source, c.columns))
        AND c.predicate IS NOT DISTINCT FROM $5 AND c.old = $6 AND c.omit = $7
        AND {schema}.stream_columns(c.source, c.filters) = $8::text[]::name[]
)

-- name: stream_snapshot_step
SELECT * FROM {schema}.stream_snapshot_step($1, $2, make_interval(secs => $3::double precision))

-- name: stream_descriptions
-- The descriptions of the shapes that the source of a stream of changes has had, newest first: the id from which on each counts, and its line.
SELECT h.since, h.line FROM {schema}.stream_shape h WHERE h.stream = $1 ORDER BY h.number DESC, h.since
