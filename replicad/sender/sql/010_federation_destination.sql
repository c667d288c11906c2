-- federation_destination: one row per source and destination that was ever written to. Written by the sender that serves
-- it. A source is what one sender, or several that share the destinations, deliver: the stream of their facts, or without
-- one the first of their streams of updates. All that a sender keeps is of one source.
-- txn_... is the transaction under way: written down before it is sent, so that it is repeated as it was.
CREATE TABLE IF NOT EXISTS federation_destination (
    source text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    last_successful_stream_ordering bigint NOT NULL DEFAULT 0,  -- it has every fact up to here
    last_successful_part integer NOT NULL DEFAULT 0,            -- which of the rows that share that token
    serial bigint NOT NULL DEFAULT 0,                           -- transactions made so far; part of their ids
    txn_id text,                                                -- NULL: none under way
    txn_ts bigint,                                              -- when it was made, ms since 1970
    txn_stream_ordering bigint,                                 -- last_successful_... once it is taken
    txn_part integer,
    txn_edus text[],                                            -- its updates
    txn_edu_ids bigint[],                                       -- those of them that stand in federation_edu
    txn_pdus text[],                                            -- its facts, if they are not what federation_fact has
    failures integer NOT NULL DEFAULT 0,                        -- in a row
    failing_since timestamptz,
    retry_at timestamptz,
    last_error text,
    catching_up boolean NOT NULL DEFAULT false,                 -- of a room's facts only the latest is still wanted
    txn_aside json,                                             -- what is parked once it is taken; else NULL
    PRIMARY KEY (source, name)
);
ALTER TABLE federation_destination SET (fillfactor = 60);  -- updated in place, again and again
COMMENT ON TABLE federation_destination IS 'replicad sender: destinations, how far each has got, and their back-off';
