-- federation_source_kept(source, destination, token): whether the destination has a transaction under way that is repeated
-- as it was although the stream goes back to `token`: one that has stored updates, or facts that are not void. The
-- destination may have taken it, and its answer was lost. In a new transaction it would get these a second time.
-- A trial (txn_aside) holds one item: an update, or a fact above all that was refused before it.
CREATE OR REPLACE FUNCTION federation_source_kept(source text, destination text, token bigint) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM federation_destination d
        WHERE d.source = federation_source_kept.source AND d.name = federation_source_kept.destination
            AND d.txn_id IS NOT NULL
            AND (cardinality(d.txn_edu_ids) > 0 OR d.txn_aside IS NULL AND EXISTS (
                SELECT FROM federation_destination_room r
                WHERE r.source = d.source AND r.destination = d.name
                    AND r.stream_ordering <= federation_source_kept.token
                    AND (r.stream_ordering, r.part) <= (d.txn_stream_ordering, d.txn_part)))
    )
$$;
