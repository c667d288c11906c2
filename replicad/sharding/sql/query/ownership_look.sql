SELECT to_json(l)::text FROM {schema}.writer_look($1, $2) AS l
