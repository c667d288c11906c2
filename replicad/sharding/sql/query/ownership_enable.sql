SELECT {schema}.writer_enable($1, ($2::bigint)::integer)
