-- federation_fact: the facts that some destination has yet to take. Written by federation_source_record,
-- cut by federation_source_sweep. `part` tells rows apart that share a token. `body` is kept as it came: it may be signed.
CREATE TABLE IF NOT EXISTS federation_fact (
    source text COLLATE "C" NOT NULL,
    stream_ordering bigint NOT NULL,
    part integer NOT NULL,
    body json NOT NULL,
    PRIMARY KEY (source, stream_ordering, part)
);
COMMENT ON TABLE federation_fact IS 'replicad sender: facts that some destination has yet to take';
