SELECT term, beat FROM {schema}.writer_join($1, $2, make_interval(secs => $3), $4, $5::bigint[])
