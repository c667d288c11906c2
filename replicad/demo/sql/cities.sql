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
