-- Up to where the registry says that rows of the stream are gone. In the snapshot of audit_lowest.sql. $1 integer: its number.
SELECT s.trimmed_upto FROM {schema}.stream AS s WHERE s.number = $1::integer
