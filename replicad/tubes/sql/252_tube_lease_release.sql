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
