SELECT slot, term FROM {schema}.writer_give($1, $2, ($3::bigint[])::integer[], $4::bigint[], $5::text[])
