-- The leases of partitions, and how pods are acknowledged under a lease (docs/leases.md).

-- tube_term_next(): a new term, higher than all before: the next number of tube_term_seq, and 24 random bits below it. So a
-- client that did not get a term cannot guess it, and a wrong number does not match the lease of another client.
CREATE OR REPLACE FUNCTION tube_term_next() RETURNS bigint
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT nextval('tube_term_seq') << 24 | ('x' || right(gen_random_uuid()::text, 6))::bit(24)::bigint
$$;

-- tube_lease_claim(tube, partitions, partition, holder, ttl, expired): claims a partition; returns the lease's term,
-- first beat and generation.
--   partitions  the tube's number, or 1: the whole tube
--   holder      if it already holds exactly this lease, it keeps the term and gets a new beat; a new term, if the lease is
--               of an earlier generation
--   expired     beats that the caller has seen unchanged for longer than their ttl: overlapping leases with such a beat
--               are removed. If their holder is still alive, its term is refused from now on.
-- The lease belongs to the present generation (generations.sql), which begins here if history has forked.
-- Two leases overlap when a shard could belong to both: p/n and q/m where p = q modulo gcd(n, m).
-- Raises RT001, RT002 (history forks meanwhile), RT003, RT004 (with the holder), RT005. Locks the tube's row in
-- tube_registry, writes tube_lease.
CREATE OR REPLACE FUNCTION tube_lease_claim(
    tube text, partitions integer, partition integer, holder text, ttl interval, expired bigint[],
    OUT term bigint, OUT beat bigint, OUT generation text
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    present text := (tube_continue()).id;
    t tube_registry;
    other tube_lease;
BEGIN
    PERFORM tube_generation_check(present);
    t := tube_lock(tube);
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
    INSERT INTO tube_lease AS l (tube, partitions, partition, holder, term, beat, ttl, generation)
        VALUES (t.tube, partitions, partition, holder, tube_term_next(), nextval('tube_term_seq'), ttl, present)
        ON CONFLICT ON CONSTRAINT tube_lease_pkey DO UPDATE SET beat = excluded.beat, ttl = excluded.ttl,
            term = CASE WHEN l.generation = present THEN l.term ELSE excluded.term END, generation = present
        RETURNING l.term, l.beat, l.generation INTO term, beat, generation;
END
$$;

-- tube_lease_lost(tube, partitions, partition, term): raises RT002. If history has forked, so that no lease of before is
-- valid, it says so. Writes nothing.
CREATE OR REPLACE FUNCTION tube_lease_lost(tube text, partitions integer, partition integer, term bigint) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    holder text;
    g tube_generation := tube_generation_now();
BEGIN
    IF tube_generation_valid() IS NULL OR term <= g.after_term AND g.number > 1 THEN
        PERFORM tube_refuse('RT002',
            format('history forked%s: term %s of partition %s/%s of tube %L was given before that',
                CASE WHEN term <= g.after_term THEN format(' (%s, %s)', g.reason, g.created_at) END,
                term, partition, partitions, tube),
            'nothing was read or acked; claim the partition anew, and read it from its first pod');
    END IF;
    SELECT string_agg(DISTINCT l.holder, ', ') INTO holder FROM tube_lease l
        WHERE l.tube = tube_lease_lost.tube AND l.partition % gcd(l.partitions, tube_lease_lost.partitions)
            = tube_lease_lost.partition % gcd(l.partitions, tube_lease_lost.partitions);
    PERFORM tube_refuse('RT002',
        format('term %s does not hold partition %s/%s of tube %L%s', term, partition, partitions, tube,
            coalesce(': it is held by ' || holder, '')), 'nothing was read or acked; claim the partition anew');
END
$$;

-- tube_lease_renew(tube, partitions, partition, term): gives exactly this lease a new beat. Raises RT002. Writes
-- tube_lease.
CREATE OR REPLACE FUNCTION tube_lease_renew(tube text, partitions integer, partition integer, term bigint)
RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    new_beat bigint;
    valid text := tube_generation_valid();
BEGIN
    UPDATE tube_lease l SET beat = nextval('tube_term_seq')
        WHERE l.tube = tube_lease_renew.tube AND l.partitions = tube_lease_renew.partitions
            AND l.partition = tube_lease_renew.partition AND l.term = tube_lease_renew.term
            AND l.generation = valid
        RETURNING l.beat INTO new_beat;
    IF NOT FOUND THEN
        PERFORM tube_lease_lost(tube, partitions, partition, term);
    END IF;
    RETURN new_beat;
END
$$;

-- tube_lease_release(tube, partitions, partition, term): deletes exactly this lease; false if there is none.
-- Writes tube_lease.
CREATE OR REPLACE FUNCTION tube_lease_release(tube text, partitions integer, partition integer, term bigint)
RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    DELETE FROM tube_lease l
        WHERE l.tube = tube_lease_release.tube AND l.partitions = tube_lease_release.partitions
            AND l.partition = tube_lease_release.partition AND l.term = tube_lease_release.term;
    RETURN FOUND;
END
$$;

-- tube_lease_check(tube, partitions, partition, term, in_generation): true if a lease with that term covers the partition,
-- and its generation is valid. Raises RT002. It is part of the statement that reads, so that both use one snapshot. Writes
-- nothing.
--   in_generation  the generation in which the caller has read the tube's position; NULL: the statement uses no position
CREATE OR REPLACE FUNCTION tube_lease_check(
    tube text, partitions integer, partition integer, term bigint, in_generation text = NULL
) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    valid text := tube_generation_valid();
BEGIN
    PERFORM FROM tube_lease l
        WHERE l.tube = tube_lease_check.tube AND l.term = tube_lease_check.term
            AND l.generation = valid AND valid = coalesce(in_generation, valid)
            AND tube_lease_check.partitions % l.partitions = 0
            AND tube_lease_check.partition % l.partitions = l.partition;
    IF NOT FOUND THEN
        PERFORM tube_lease_lost(tube, partitions, partition, term);
    END IF;
    RETURN true;
END
$$;

-- tube_lease_hold(tube, partitions, partition, term): as tube_lease_check. Until the transaction ends the lease cannot be
-- removed, but it can be renewed. Raises RT002. Locks the lease's row.
CREATE OR REPLACE FUNCTION tube_lease_hold(tube text, partitions integer, partition integer, term bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    valid text := tube_generation_valid();
BEGIN
    PERFORM FROM tube_lease l
        WHERE l.tube = tube_lease_hold.tube AND l.term = tube_lease_hold.term
            AND l.generation = valid
            AND tube_lease_hold.partitions % l.partitions = 0
            AND tube_lease_hold.partition % l.partitions = l.partition
        FOR KEY SHARE;
    IF NOT FOUND THEN
        PERFORM tube_lease_lost(tube, partitions, partition, term);
    END IF;
END
$$;

-- tube_ack(tube, partitions, partition, term, seqs): deletes pods that the downstream has, if they belong to the
-- partition, and returns how many, and how old they were, as tube_ages_sql counts it. Fewer than given: some were deleted before or belong to another partition.
-- The number of partitions is that under which the pods were read. The lease guarantees that no other worker has them.
-- Raises RT002, RT005. Locks the lease's row, writes the tube.
CREATE OR REPLACE FUNCTION tube_ack(
    tube text, partitions integer, partition integer, term bigint, seqs bigint[],
    OUT pods bigint, OUT ages bigint[], OUT seconds float8
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_lease_hold(tube, partitions, partition, term);
    SELECT * INTO pods, ages, seconds FROM tube_remove(tube, partitions, partition, seqs);
END
$$;

-- tube_ack_all(tube, partitions, partitions_of, terms, seqs, numbers): as tube_ack, for several readers at once: partitions_of
-- and terms have their partitions and terms, numbers says for each seq whose it is, counted from 1. Returns how many pods of
-- each reader were deleted, and how old all of them were. Raises RT002, RT005: then nothing was removed. Locks the leases' rows, by partition, and writes the tube.
CREATE OR REPLACE FUNCTION tube_ack_all(
    tube text, partitions integer, partitions_of integer[], terms bigint[], seqs bigint[], numbers integer[],
    OUT pods bigint[], OUT ages bigint[], OUT seconds float8
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    valid text := tube_generation_valid();
    held bigint[];
    shards integer[];
BEGIN
    SELECT array_agg(l.n) INTO held FROM (
        SELECT a.n FROM unnest(partitions_of, terms) WITH ORDINALITY AS a (partition, term, n)
        JOIN tube_lease l ON l.tube = tube_ack_all.tube AND l.term = a.term AND l.generation = valid
            AND tube_ack_all.partitions % l.partitions = 0 AND a.partition % l.partitions = l.partition
        ORDER BY l.partitions, l.partition FOR KEY SHARE OF l) AS l;
    FOR number IN 1 .. cardinality(terms) LOOP
        PERFORM tube_check_partition(partitions, partitions_of[number]);
        IF (number = ANY (held)) IS NOT TRUE THEN
            PERFORM tube_lease_lost(tube, partitions, partitions_of[number], terms[number]);
        END IF;
    END LOOP;
    EXECUTE format('WITH gone AS (DELETE FROM %I AS pod USING unnest($1, $2) AS asked (seq, n)'
        ' WHERE pod.seq = asked.seq AND (pod.shard %% %s) = ($3)[asked.n] RETURNING asked.n, pod.shard, %s),'
        ' counted AS (SELECT gone.n, count(*) AS pods FROM gone GROUP BY gone.n)'
        ' SELECT array_agg(coalesce(counted.pods, 0) ORDER BY each.n), (SELECT array_agg(DISTINCT gone.shard) FROM gone), %s'
        ' FROM generate_series(1, cardinality($3)) AS each (n) LEFT JOIN counted ON counted.n = each.n',
        tube, partitions, tube_age_sql('pod'), tube_ages_sql())
        INTO pods, shards, ages, seconds USING seqs, numbers, partitions_of;
    PERFORM tube_shards_note(tube, shards);
END
$$;

-- tube_ack_upto(tube, partitions, partition, term, after_regular, after_backfill, upto_regular, upto_backfill): the
-- same for all regular pods with after_regular < seq <= upto_regular and all backfill pods in their range.
CREATE OR REPLACE FUNCTION tube_ack_upto(
    tube text, partitions integer, partition integer, term bigint,
    after_regular bigint, after_backfill bigint, upto_regular bigint, upto_backfill bigint,
    OUT pods bigint, OUT ages bigint[], OUT seconds float8
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_lease_hold(tube, partitions, partition, term);
    SELECT * INTO pods, ages, seconds FROM tube_remove_range(tube, partitions, partition, false, after_regular, upto_regular);
    pods := pods + (tube_remove_range(tube, partitions, partition, true, after_backfill, upto_backfill)).pods;
END
$$;

-- tube_remove_range(tube, partitions, partition, backfill, after, upto): deletes a partition's pods of one priority
-- with after < seq <= upto, without any check; returns how many, and how old, as tube_ages_sql counts it (NULL: the range
-- is empty). Writes the tube and tube_shard.
CREATE OR REPLACE FUNCTION tube_remove_range(
    tube text, partitions integer, partition integer, backfill boolean, after bigint, upto bigint,
    OUT pods bigint, OUT ages bigint[], OUT seconds float8
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    shards integer[];
BEGIN
    pods := 0;
    IF after < upto THEN
        EXECUTE tube_removal_sql(tube, format('(shard %% %s) = %s AND (op = ''B'')::integer = %s'
            ' AND seq > %s AND seq <= %s AND %s', partitions, partition, backfill::integer,
            greatest(after, tube_low_of(tube, partitions, partition, backfill, upto)), upto, tube_served_sql())) INTO pods, shards, ages, seconds;
        PERFORM tube_shards_note(tube, shards);
    END IF;
END
$$;
