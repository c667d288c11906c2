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

-- name: demo_orders
-- The tables of the small demonstration.
DROP TABLE IF EXISTS orders, events;
CREATE TABLE orders (id bigserial PRIMARY KEY, item text NOT NULL, amount integer NOT NULL);
CREATE TABLE events (id bigserial PRIMARY KEY, instance_name text, body jsonb NOT NULL)

-- name: demo_orders_fill
-- Orders: $1 of them.
INSERT INTO orders (item, amount) SELECT 'item ' || n, n % 10 + 1 FROM generate_series(1, $1::integer) n

-- name: demo_orders_load
-- Orders by id, as a worker loads them.
SELECT id, item, amount FROM orders WHERE id = ANY ($1::bigint[])

-- name: demo_orders_all
-- All orders, to compare.
SELECT id, item, amount FROM orders

-- name: demo_orders_change
-- Changes as an application makes them.
WITH removed AS (DELETE FROM orders WHERE id % 50 = 0),
     added AS (INSERT INTO orders (item, amount) SELECT 'new item ' || n, 1 FROM generate_series(1, 100) n)
UPDATE orders SET amount = amount + 1 WHERE id % 5 = 1

-- name: demo_events
-- Events: $1 of them.
INSERT INTO events (body) SELECT jsonb_build_array('order', n) FROM generate_series(1, $1::integer) n

-- name: demo_events_ids
-- The ids of all events, in order, as JSON.
SELECT coalesce(json_agg(id ORDER BY id), '[]')::text FROM events
