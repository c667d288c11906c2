SELECT slot, term FROM {schema}.writer_take(
    $1, $2, $3, ($4::bigint[])::integer[], $5::bigint[], make_interval(secs => $6::float8)
)
