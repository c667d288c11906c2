-- How far each stream's sequence is used up: its last value, and the highest that it, or a reservation, can give.
SELECT s.name, pg_sequence_last_value(s.sequence) AS last,
    CASE WHEN s.method = 'reservation' THEN least(q.seqmax, (1::bigint << 48) - 1) ELSE q.seqmax END AS most
FROM {schema}.stream AS s
JOIN pg_sequence AS q ON q.seqrelid = s.sequence
WHERE has_sequence_privilege(s.sequence::oid, 'SELECT') OR has_sequence_privilege(s.sequence::oid, 'USAGE')
ORDER BY s.name
