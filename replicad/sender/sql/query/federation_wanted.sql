-- The destinations of a source ($1) for which the operator wants something parked to be sent again.
SELECT DISTINCT p.destination FROM {schema}.federation_parked p WHERE p.source = $1 AND p.wanted
