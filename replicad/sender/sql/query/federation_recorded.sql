-- Up to where a sender ($2) of a source ($1) has recorded each stream, and up to where all senders of its name have.
SELECT s.stream, s.token, s.epoch, {schema}.federation_source_recorded(s.name, s.stream) AS everywhere
FROM {schema}.federation_sender s
WHERE s.source = $1 AND s.name = $2
