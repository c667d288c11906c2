SELECT {schema}.writer_owns($1, $2, $3, $4)
