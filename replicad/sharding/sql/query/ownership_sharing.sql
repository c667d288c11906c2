-- One stream whose writers share the keys. Raises RS001, RS002.
SELECT w.slots, count(*) FILTER (WHERE m.instance IS NULL)::integer AS unowned
FROM {schema}.writer_find($1) w
JOIN {schema}.writer_slot x ON x.stream = w.stream
LEFT JOIN {schema}.writer_member m ON m.stream = x.stream AND m.instance = x.owner AND m.term < x.term
GROUP BY w.slots
