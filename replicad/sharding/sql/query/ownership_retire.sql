SELECT {schema}.writer_retire($1, $2, $3)
