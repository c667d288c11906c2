-- tube_lease_lost(tube, partitions, partition, term): raises RT002. Writes nothing.
CREATE OR REPLACE FUNCTION tube_lease_lost(tube text, partitions integer, partition integer, term bigint) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    holder text;
BEGIN
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
BEGIN
    UPDATE tube_lease l SET beat = nextval('tube_term_seq')
        WHERE l.tube = tube_lease_renew.tube AND l.partitions = tube_lease_renew.partitions
            AND l.partition = tube_lease_renew.partition AND l.term = tube_lease_renew.term
        RETURNING l.beat INTO new_beat;
    IF NOT FOUND THEN
        PERFORM tube_lease_lost(tube, partitions, partition, term);
    END IF;
    RETURN new_beat;
END
$$;
