CREATE SCHEMA shard_0001;
CREATE SCHEMA shard_0002;
CREATE TABLE shard_0001.cities (id bigint PRIMARY KEY, name text, population int);
CREATE TABLE shard_0002.cities (id bigint PRIMARY KEY, name text, population int);
INSERT INTO shard_0001.cities SELECT n, 'one ' || n, n FROM generate_series(1, 10000) AS n;
INSERT INTO shard_0002.cities SELECT n, 'two ' || n, n FROM generate_series(1, 10000) AS n;
