-- Removes what is parked for good; arguments as for federation_parked. Returns how many there were.
WITH gone AS (
    DELETE FROM {schema}.federation_parked p
    WHERE ($1::bigint[] = '{{}}' OR p.id = ANY ($1)) AND ($2::text IS NULL OR p.source = $2)
        AND ($3::text IS NULL OR p.destination = $3)
    RETURNING 1
)
SELECT count(*) FROM gone
