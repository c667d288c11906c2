SELECT {schema}.writer_leave($1, $2, $3)
