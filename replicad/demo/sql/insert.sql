-- A new town beside every 101st city. The ids lie above all of GeoNames' (about 13 million), and differ between shards
-- because those of the neighbours do.
INSERT INTO cities (id, name, country, timezone, latitude, longitude, population, alternate_names)
SELECT 1000000000 + id, name || ' Garden City', country, timezone, latitude, longitude, 5000, ARRAY[name]
FROM cities
WHERE id % 101 = 0 AND id < 1000000000
ON CONFLICT DO NOTHING
