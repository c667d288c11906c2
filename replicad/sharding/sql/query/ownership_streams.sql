SELECT s.name FROM {schema}.writer_sharding w JOIN {schema}.stream s ON s.number = w.stream ORDER BY s.name
