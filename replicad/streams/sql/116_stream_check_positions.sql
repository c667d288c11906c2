-- stream_check_positions(positions): refuses a table that cannot hold the positions that writers publish themselves.
CREATE OR REPLACE FUNCTION stream_check_positions(positions regclass) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF positions IS NULL THEN
        PERFORM stream_refuse_argument('the method positions_table needs the table in which the writers publish',
            'name it; it has the columns stream_name, instance_name and stream_id');
    END IF;
    IF stream_column_type(positions, 'stream_name') IS NULL OR stream_column_type(positions, 'instance_name') IS NULL
        OR stream_column_type(positions, 'stream_id') NOT IN ('bigint'::regtype, 'integer'::regtype) THEN
        PERFORM stream_refuse(format('column stream_id of %s is not a bigint', positions),
            'it holds the id up to which the writer has finished');
    END IF;
END
$$;
