-- federation_source_transaction(source, destination): the transaction under way, to be repeated as it was; no row
-- where there is none.
CREATE OR REPLACE FUNCTION federation_source_transaction(source text, destination text)
RETURNS TABLE (id text, serial bigint, ts bigint, token bigint, part integer, edus text[], edu_ids bigint[],
    pdus text[], substituted boolean, aside json)
LANGUAGE sql STABLE AS $$
    SELECT d.txn_id, d.serial, d.txn_ts, d.txn_stream_ordering, d.txn_part, coalesce(d.txn_edus, '{}'),
        coalesce(d.txn_edu_ids, '{}'),
        coalesce(d.txn_pdus, ARRAY(
            SELECT f.body::text
            FROM federation_destination_room r
            JOIN federation_fact f ON f.source = r.source AND f.stream_ordering = r.stream_ordering AND f.part = r.part
            WHERE r.source = d.source AND r.destination = d.name
                AND (r.stream_ordering, r.part) <= (d.txn_stream_ordering, d.txn_part)
            ORDER BY r.stream_ordering, r.part
        )),
        d.txn_pdus IS NOT NULL, d.txn_aside
    FROM federation_destination d
    WHERE d.source = federation_source_transaction.source AND d.name = federation_source_transaction.destination
        AND d.txn_id IS NOT NULL
$$;
