-- presence_beat(daemon, beat): a sign of life of the daemon whose last one, as far as it knows, was `beat`: it may be one
-- further, where an answer was lost. Returns the new beat; NULL where the daemon's users were cleared, or where this is
-- not the database that it wrote to last, but an older state of it. Writes presence_daemon.
CREATE OR REPLACE FUNCTION presence_beat(daemon uuid, beat bigint) RETURNS bigint
LANGUAGE sql AS $$
    UPDATE presence_daemon d SET beat = d.beat + 1
    WHERE d.id = presence_beat.daemon AND NOT d.buried
        AND d.beat BETWEEN presence_beat.beat AND presence_beat.beat + 1
    RETURNING d.beat
$$;
