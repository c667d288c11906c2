-- tube_lease_check(tube, partitions, partition, term): true if a lease with that term is of the partition or of one
-- that contains it. Raises RT002. It is part of the statement that reads, so that both use one snapshot. Writes
-- nothing.
CREATE OR REPLACE FUNCTION tube_lease_check(tube text, partitions integer, partition integer, term bigint)
RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM FROM tube_lease l
        WHERE l.tube = tube_lease_check.tube AND l.term = tube_lease_check.term
            AND tube_lease_check.partitions % l.partitions = 0
            AND tube_lease_check.partition % l.partitions = l.partition;
    IF NOT FOUND THEN
        PERFORM tube_lease_lost(tube, partitions, partition, term);
    END IF;
    RETURN true;
END
$$;

-- tube_lease_hold(tube, partitions, partition, term): the same; until the transaction ends the lease cannot be removed,
-- but it can be renewed. Raises RT002. Locks the lease's row.
CREATE OR REPLACE FUNCTION tube_lease_hold(tube text, partitions integer, partition integer, term bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM FROM tube_lease l
        WHERE l.tube = tube_lease_hold.tube AND l.term = tube_lease_hold.term
            AND tube_lease_hold.partitions % l.partitions = 0
            AND tube_lease_hold.partition % l.partitions = l.partition
        FOR KEY SHARE;
    IF NOT FOUND THEN
        PERFORM tube_lease_lost(tube, partitions, partition, term);
    END IF;
END
$$;
