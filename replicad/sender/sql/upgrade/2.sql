-- Version 2: the generation of a stream in which a token was recorded.
ALTER TABLE federation_sender ADD COLUMN epoch text;
