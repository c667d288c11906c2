-- Version 2: a bound on the length of a row, writers that were retired, whether the sequence feeds the id column, and of
-- which table and sequence a published position speaks.
ALTER TABLE stream ADD COLUMN max_row integer NOT NULL DEFAULT 67108864 CHECK (max_row BETWEEN 1024 AND 67108864);
ALTER TABLE stream ADD COLUMN fed boolean NOT NULL DEFAULT false;
UPDATE stream s SET fed = stream_sequence(s.relation, s.id_column) IS NOT DISTINCT FROM s.sequence;
ALTER TABLE stream_writer ADD COLUMN retired_at timestamptz;
ALTER TABLE stream_position ADD COLUMN relation oid;
ALTER TABLE stream_position ADD COLUMN sequence oid;
