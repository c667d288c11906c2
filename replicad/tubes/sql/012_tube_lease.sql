-- tube_lease: the holder of each partition, who may read and ack it. Written by tube_lease_claim, _renew and _release.
-- tube_term_seq numbers terms and beats. No number is used twice: a changed beat shows without any clock that the
-- holder is alive, and no new lease has an old term (tube_term_next).
CREATE SEQUENCE IF NOT EXISTS tube_term_seq;
COMMENT ON SEQUENCE tube_term_seq IS 'replicad: terms and beats of all leases';

CREATE TABLE IF NOT EXISTS tube_lease (
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    partitions integer NOT NULL,
    partition integer NOT NULL CHECK (partition BETWEEN 0 AND partitions - 1),
    holder text NOT NULL,
    term bigint NOT NULL,
    beat bigint NOT NULL,                     -- changes with every renewal
    ttl interval NOT NULL,                    -- unchanged for this long on the watcher's own clock: expired
    PRIMARY KEY (tube, partitions, partition)
);
COMMENT ON TABLE tube_lease IS 'replicad: leases of partitions, fenced by their term';
