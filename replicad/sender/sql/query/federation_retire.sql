-- Forgets all that the senders of a source ($1) have stored.
WITH senders AS (DELETE FROM {schema}.federation_sender s WHERE s.source = $1),
    destinations AS (DELETE FROM {schema}.federation_destination d WHERE d.source = $1),
    rooms AS (DELETE FROM {schema}.federation_destination_room r WHERE r.source = $1),
    facts AS (DELETE FROM {schema}.federation_fact f WHERE f.source = $1),
    updates AS (DELETE FROM {schema}.federation_edu u WHERE u.source = $1)
DELETE FROM {schema}.federation_parked p WHERE p.source = $1
