-- Streams of before version 2 get their first generation here. Its id is what version 1 made of the server and of the
-- stream, so that the tokens of readers stay good.
INSERT INTO stream_generation
    (stream, number, id, began_at, writers, positions, reason, incarnation, relation, sequence, file)
SELECT s.number, 1, left(encode(sha256(convert_to(concat_ws(' ',
        (SELECT c.system_identifier FROM pg_control_system() c), left(pg_walfile_name(pg_current_wal_lsn()), 8),
        (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()),
        s.number, extract(epoch FROM s.created_at), s.resets), 'UTF8')), 'hex'), 16),
    stream_floor(s.sequence), '{}', '{}', 'added', stream_incarnation(), s.relation::oid, s.sequence::oid,
    pg_relation_filenode(s.sequence)
FROM stream s
WHERE NOT EXISTS (SELECT FROM stream_generation g WHERE g.stream = s.number);
