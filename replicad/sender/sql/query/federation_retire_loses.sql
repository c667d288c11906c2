-- What retiring all senders of a source ($1) forgets: facts and updates that wait, each for a destination, and what is
-- parked.
SELECT (SELECT count(*) FROM {schema}.federation_destination_room r WHERE r.source = $1) AS facts,
    (SELECT count(*) FROM {schema}.federation_edu u WHERE u.source = $1) AS updates,
    (SELECT count(*) FROM {schema}.federation_parked p WHERE p.source = $1) AS parked
