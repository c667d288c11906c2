-- The tables of the demonstration, and what changes them.

-- name: demo_cities
-- One shard of the demonstration: the cities of a continent, in the current schema.
-- Called with search_path set to shard_NNNN; the number that ends the schema's name is the shard's.

CREATE TABLE cities (
  id              bigint PRIMARY KEY,            -- GeoNames' own id, unique over all shards
  name            text NOT NULL,
  country         text NOT NULL,                 -- ISO 3166, two letters
  timezone        text NOT NULL,
  latitude        double precision NOT NULL,     -- degrees
  longitude       double precision NOT NULL,
  population      bigint NOT NULL,
  alternate_names text[] NOT NULL DEFAULT '{}',
  updated_at      timestamptz NOT NULL DEFAULT now()
);

-- name: demo_update
-- A census: every tenth city of the shard (by id) has grown, and a few of them were renamed.
UPDATE cities
SET population = population + 1 + population / 50,
    name = CASE WHEN id % 200 = 0 THEN 'New ' || name ELSE name END,
    updated_at = clock_timestamp()
WHERE id % 10 = 0

-- name: demo_delete
-- Places that are cities no more.
DELETE FROM cities WHERE id % 97 = 0

-- name: demo_insert
-- A new town beside every 101st city. The ids lie above all of GeoNames' (about 13 million), and differ between shards
-- because those of the neighbours do.
INSERT INTO cities (id, name, country, timezone, latitude, longitude, population, alternate_names)
SELECT 1000000000 + id, name || ' Garden City', country, timezone, latitude, longitude, 5000, ARRAY[name]
FROM cities
WHERE id % 101 = 0 AND id < 1000000000
ON CONFLICT DO NOTHING

-- name: demo_census
-- What the census changed, a row per shard: a table with a sequence-fed id, which is all that a stream needs.
DROP TABLE IF EXISTS public.census;
CREATE TABLE public.census (
  id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  shard     integer NOT NULL,
  updated   integer NOT NULL,
  deleted   integer NOT NULL,
  inserted  integer NOT NULL,
  at        timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- name: demo_note
-- Tell the stream what the census of a shard changed.
INSERT INTO public.census (shard, updated, deleted, inserted) VALUES ($1, $2, $3, $4)
