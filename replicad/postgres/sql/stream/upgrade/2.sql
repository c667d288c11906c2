-- Version 2: a bound on the length of a row, and writers that were retired.
ALTER TABLE stream ADD COLUMN max_row integer NOT NULL DEFAULT 67108864 CHECK (max_row BETWEEN 1024 AND 67108864);
ALTER TABLE stream_writer ADD COLUMN retired_at timestamptz;
