-- Version 3: all that a sender keeps is of one source, so that several streams are delivered from one database. What
-- versions 1 and 2 have recorded is of the source '' until a sender of this version takes it over.
ALTER TABLE federation_destination ADD COLUMN source text COLLATE "C" NOT NULL DEFAULT '', ADD COLUMN txn_aside json,
    DROP CONSTRAINT federation_destination_pkey, ADD PRIMARY KEY (source, name);
ALTER TABLE federation_fact ADD COLUMN source text COLLATE "C" NOT NULL DEFAULT '',
    DROP CONSTRAINT federation_fact_pkey, ADD PRIMARY KEY (source, stream_ordering, part);
ALTER TABLE federation_destination_room ADD COLUMN source text COLLATE "C" NOT NULL DEFAULT '',
    DROP CONSTRAINT federation_destination_room_pkey, ADD PRIMARY KEY (source, destination, stream_ordering, part);
ALTER TABLE federation_edu ADD COLUMN source text COLLATE "C" NOT NULL DEFAULT '',
    DROP CONSTRAINT federation_edu_destination_key_key, ADD UNIQUE (source, destination, key);
DROP INDEX federation_edu_destination_id;
ALTER TABLE federation_sender ADD COLUMN source text COLLATE "C" NOT NULL DEFAULT '',
    DROP CONSTRAINT federation_sender_pkey, ADD PRIMARY KEY (source, name, stream);
