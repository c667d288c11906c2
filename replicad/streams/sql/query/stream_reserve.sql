SELECT number, bound, ids::text AS ids FROM {schema}.stream_reserve($1, ($2)::integer, $3)
