SELECT unnest({schema}.writer_expel($1, $2::bigint[]))
