-- tube_term_next(): a new term, higher than all before: the next number of tube_term_seq, and 24 random bits below it.
-- So a client that was not told a term cannot guess it, and nobody meets another's lease by a number that he got wrong.
CREATE OR REPLACE FUNCTION tube_term_next() RETURNS bigint
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT nextval('tube_term_seq') << 24 | ('x' || right(gen_random_uuid()::text, 6))::bit(24)::bigint
$$;

-- tube_lease_claim(tube, partitions, partition, holder, ttl, expired): claims a partition; returns the lease's term and
-- first beat.
--   partitions  the tube's number, or 1: the whole tube
--   holder      if it already holds exactly this lease, it keeps the term and gets a new beat
--   expired     beats that the caller has seen unchanged for longer than their ttl: overlapping leases with such a beat
--               are removed. If their holder is still alive, its term is refused from now on.
-- Two leases overlap when a shard could belong to both: p/n and q/m where p = q modulo gcd(n, m).
-- Raises RT001, RT003, RT004 (with the holder), RT005. Locks the tube's row in tube_registry, writes tube_lease.
CREATE OR REPLACE FUNCTION tube_lease_claim(
    tube text, partitions integer, partition integer, holder text, ttl interval, expired bigint[],
    OUT term bigint, OUT beat bigint
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_lock(tube);
    other tube_lease;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    IF partitions <> 1 THEN
        PERFORM tube_check_partitions(tube, partitions);
    END IF;
    IF coalesce(holder, '') = '' OR coalesce(ttl, '0') <= '0'::interval THEN
        PERFORM tube_refuse('RT005', 'a lease has a holder with a name, and a time to live above 0', 'give both');
    END IF;
    DELETE FROM tube_lease l WHERE l.tube = t.tube AND l.beat = ANY (expired)
        AND l.partition % gcd(l.partitions, tube_lease_claim.partitions)
            = tube_lease_claim.partition % gcd(l.partitions, tube_lease_claim.partitions);
    SELECT * INTO other FROM tube_lease l WHERE l.tube = t.tube
        AND l.partition % gcd(l.partitions, tube_lease_claim.partitions)
            = tube_lease_claim.partition % gcd(l.partitions, tube_lease_claim.partitions)
        AND (l.holder, l.partitions, l.partition)
            IS DISTINCT FROM (tube_lease_claim.holder, tube_lease_claim.partitions, tube_lease_claim.partition)
        LIMIT 1;
    IF FOUND THEN
        PERFORM tube_refuse('RT004',
            format('partition %s/%s of tube %L is held by %s', other.partition, other.partitions, t.tube, other.holder),
            'wait until it is released, or until its time to live has passed without a sign of life');
    END IF;
    INSERT INTO tube_lease AS l (tube, partitions, partition, holder, term, beat, ttl)
        VALUES (t.tube, partitions, partition, holder, tube_term_next(), nextval('tube_term_seq'), ttl)
        ON CONFLICT ON CONSTRAINT tube_lease_pkey DO UPDATE SET beat = excluded.beat, ttl = excluded.ttl
        RETURNING l.term, l.beat INTO term, beat;
END
$$;
