SELECT {schema}.stream_next_mult($1, ($2)::integer)::text
