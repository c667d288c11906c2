-- stream: the registry, one row per stream. Written by stream_add, stream_remove, stream_max_row and stream_trim.
CREATE TABLE IF NOT EXISTS stream (
    number smallint PRIMARY KEY CHECK (number BETWEEN 1 AND 8191),  -- stands in the keys of advisory locks
    name text NOT NULL UNIQUE,
    relation regclass NOT NULL,
    id_column name NOT NULL,
    instance_column name,                     -- NULL: one writer, called master
    row_sql text,                             -- NULL: the whole row as a JSON object
    row_type text NOT NULL,                   -- json, jsonb or text: what row_sql yields
    method text NOT NULL CHECK (method IN ('lock_watch', 'reservation', 'positions_table')),
    sequence regclass NOT NULL,
    positions regclass,                       -- where the writers publish, for positions_table
    setting text NOT NULL,                    -- transaction-local memory of a reservation, of a name nobody else uses
    trimmed_upto bigint,                      -- ids up to here are gone on purpose; a token below has missed rows
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- bytes of the longest line that the stream may send; 64 MiB is what clients take at most
    max_row integer NOT NULL DEFAULT 67108864 CHECK (max_row BETWEEN 1024 AND 67108864),
    fed boolean NOT NULL DEFAULT false,       -- when it was added, the sequence was the one that feeds the column
    -- the schema and the name that the table, the sequence and the table of positions had when the stream was added: what the
    -- user meant. Where they lead to another relation now, the stream stops (stream_name_fault). NULL: not compared
    relation_named text[],
    sequence_named text[],
    positions_named text[],
    also_feeds regclass[] NOT NULL DEFAULT '{}',  -- the other tables that the sequence fed then
    parted oid[] NOT NULL DEFAULT '{}'  -- tables that were partitions or heirs, and draw from the sequence still
);
COMMENT ON TABLE stream IS 'replicad: the registered streams; use stream_add() and stream_remove()';
