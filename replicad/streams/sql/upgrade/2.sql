-- Version 2: a bound on the length of a row, writers that were retired, whether the sequence feeds the id column, and
-- generations, and the key of the daemons' channel (their tables are new; 199_stream_generation_first.sql fills it).
ALTER TABLE stream ADD COLUMN max_row integer NOT NULL DEFAULT 67108864 CHECK (max_row BETWEEN 1024 AND 67108864);
ALTER TABLE stream ADD COLUMN fed boolean NOT NULL DEFAULT false;
UPDATE stream s SET fed = stream_sequence(s.relation, s.id_column) IS NOT DISTINCT FROM s.sequence;
ALTER TABLE stream_writer ADD COLUMN retired_at timestamptz;
