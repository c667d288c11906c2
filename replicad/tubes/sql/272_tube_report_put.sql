-- tube_report_put(tube, reporter, counts): stores the report of a reader of the tube, in place of its last one. Reports
-- that are older than a week are deleted, and all but the newest 100. Raises RT001, RT005. Writes tube_report.
CREATE OR REPLACE FUNCTION tube_report_put(tube text, reporter text, counts jsonb) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM tube_keep(tube);
    IF coalesce(reporter, '') = '' OR jsonb_typeof(counts) IS DISTINCT FROM 'object' THEN
        PERFORM tube_refuse('RT005', 'a report has a reporter and an object of counts', 'give both');
    END IF;
    INSERT INTO tube_report AS r (tube, reporter, counts) VALUES (tube, reporter, counts)
        ON CONFLICT ON CONSTRAINT tube_report_pkey
        DO UPDATE SET counts = excluded.counts, reported_at = excluded.reported_at;
    DELETE FROM tube_report r WHERE r.ctid = ANY (ARRAY(
        SELECT x.ctid FROM tube_report x
        WHERE x.tube = tube_report_put.tube AND (x.reported_at < clock_timestamp() - interval '7 days'
            OR x.reporter IN (SELECT y.reporter FROM tube_report y WHERE y.tube = tube_report_put.tube
                ORDER BY y.reported_at DESC OFFSET 100))
        FOR UPDATE SKIP LOCKED));  -- two who report at once do not wait for each other
END
$$;
