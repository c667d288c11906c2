SELECT {schema}.writer_beat($1, $2, $3)
