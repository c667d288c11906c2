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
