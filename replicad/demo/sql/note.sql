-- Tell the stream what the census of a shard changed.
INSERT INTO public.census (shard, updated, deleted, inserted) VALUES ($1, $2, $3, $4)
