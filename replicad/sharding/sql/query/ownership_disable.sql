SELECT {schema}.writer_disable($1)
