-- The key of an attached table: the columns that name a row, and the form of their values in a tube.
--
-- A tube has keys of one kind (tube_registry.keys): `bigint` for tables whose key is one integer column of any width, `text`
-- for all others. A key of kind text is the text of its column, as Postgres writes it under the fixed settings
-- (tube_fixed); the key of several columns is a JSON array of these texts.

-- tube_fixed(): the settings under which expressions run and keys become text, as pg_proc.proconfig has them. They are those of
-- our sessions (replicad/fixed_settings.py): a row has the same shard and the same key whoever writes it. Without
-- timezone_abbreviations, which takes 100 us to set, and the settings of reading. Writes nothing.
CREATE OR REPLACE FUNCTION tube_fixed() RETURNS text[]
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT ARRAY[{fixed_settings}]
$$;

-- tube_fixed_sql(): the same as clauses of CREATE FUNCTION and ALTER FUNCTION. Writes nothing.
CREATE OR REPLACE FUNCTION tube_fixed_sql() RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT string_agg(format(' SET %s = %L', split_part(setting, '=', 1), split_part(setting, '=', 2)), '')
    FROM unnest(tube_fixed()) AS setting
$$;

-- tube_key_types(tbl, key): the types of these columns, as casts name them; of a domain the type below it. NULL for a column
-- that the table does not have. Each type is looked up by itself: a join reads all types of the database, which has two for
-- each table. Writes nothing.
CREATE OR REPLACE FUNCTION tube_key_types(tbl regclass, key name[]) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
{key_types}$$;

-- tube_key_kind(types): the kind of a key of columns of these types. Writes nothing.
CREATE OR REPLACE FUNCTION tube_key_kind(types text[]) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN cardinality(types) = 1 AND types[1] IN ('smallint', 'integer', 'bigint') THEN 'bigint' ELSE 'text' END
$$;

-- tube_pod_size(kind): how many ids a pod has that triggers and backfills write. A hundred texts of 36 characters take half a
-- page. Writes nothing.
CREATE OR REPLACE FUNCTION tube_pod_size(kind text) RETURNS integer
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT CASE kind WHEN 'bigint' THEN 250 ELSE 100 END
$$;

-- tube_key_default(tbl, before): the key of a table for which none is named: before, if the table has these columns; or else
-- its primary key; or else the column id; or else NULL. Writes nothing.
CREATE OR REPLACE FUNCTION tube_key_default(tbl regclass, before name[]) RETURNS name[]
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT coalesce(
        CASE WHEN array_position(tube_key_types(tbl, before), NULL) IS NULL THEN before END,
        (SELECT array_agg(a.attname ORDER BY k.n)
            FROM pg_index i, unnest(i.indkey::smallint[]) WITH ORDINALITY AS k (number, n)
                JOIN pg_attribute a ON a.attnum = k.number
            WHERE i.indrelid = tbl AND i.indisprimary AND a.attrelid = tbl AND k.n <= i.indnkeyatts),
        (SELECT ARRAY[a.attname] FROM pg_attribute a
            WHERE a.attrelid = tbl AND a.attname = 'id' AND a.attnum > 0 AND NOT a.attisdropped))
$$;

-- tube_key_sql(key, kind): SQL on a row for its key. Writes nothing.
CREATE OR REPLACE FUNCTION tube_key_sql(key name[], kind text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT CASE
        WHEN kind = 'bigint' THEN format('%I::bigint', key[1])
        WHEN cardinality(key) = 1 THEN format('%I::text', key[1])
        ELSE format('json_build_array(%s)::text',
            (SELECT string_agg(format('%I::text', k.name), ', ' ORDER BY k.n) FROM unnest(key) WITH ORDINALITY AS k (name, n)))
    END
$$;

-- tube_key_text_sql(types, key): SQL for the text that names the same key as `key` (SQL for a text), and is as that of
-- tube_key_sql: a user may write 0A for 10 in a uuid, or numbers without quotes in a JSON array. Writes nothing.
CREATE OR REPLACE FUNCTION tube_key_text_sql(types text[], key text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN cardinality(types) = 1 THEN format('%s::%s::text', key, types[1])
        ELSE format('json_build_array(%s)::text',
            (SELECT string_agg(format('(%s::json ->> %s)::%s::text', key, k.n - 1, k.type), ', ' ORDER BY k.n)
                FROM unnest(types) WITH ORDINALITY AS k (type, n)))
    END
$$;

-- tube_key_among_sql(key, types, keys): SQL on a row: its key is one of `keys`, which is SQL for an array, of bigint for a key
-- of that kind, else of text. An index on the columns serves it. Writes nothing.
CREATE OR REPLACE FUNCTION tube_key_among_sql(key name[], types text[], keys text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT CASE
        WHEN tube_key_kind(types) = 'bigint' THEN format('%I = ANY (%s)', key[1], keys)
        WHEN cardinality(key) = 1 THEN format('%I = ANY (%s::%s[])', key[1], keys, types[1])
        ELSE (
            SELECT format('(%s) IN (SELECT %s FROM unnest(%s) AS given_key)', string_agg(quote_ident(k.name), ', ' ORDER BY k.n),
                string_agg(format('(given_key::json ->> %s)::%s', k.n - 1, k.type), ', ' ORDER BY k.n), keys)
            FROM unnest(key, types) WITH ORDINALITY AS k (name, type, n))
    END
$$;

-- tube_key_present_sql(key): SQL for whether a row has a key: no column of it is NULL. Writes nothing.
CREATE OR REPLACE FUNCTION tube_key_present_sql(key name[]) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT string_agg(format('%I IS NOT NULL', k.name), ' AND ' ORDER BY k.n)
    FROM unnest(key) WITH ORDINALITY AS k (name, n)
$$;

-- tube_check_key(t, tbl, key): raises RT005 if rows of the table cannot be named by these columns in this tube.
-- Writes nothing.
CREATE OR REPLACE FUNCTION tube_check_key(t tube_registry, tbl regclass, key name[]) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    types text[] := tube_key_types(tbl, key);
    named text := array_to_string(ARRAY(SELECT quote_ident(k.name) FROM unnest(key) WITH ORDINALITY AS k (name, n) ORDER BY k.n), ', ');
    fault text;
BEGIN
    IF coalesce(cardinality(key), 0) = 0 THEN
        fault := 'it has no primary key and no column called id';
    ELSIF array_position(types, NULL) IS NOT NULL THEN
        fault := format('it has no column called %I', key[array_position(types, NULL)]);
    ELSIF EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = tbl AND a.attname = ANY (key) AND a.attgenerated = 'v') THEN
        fault := format('its key (%s) has a virtual generated column, which triggers do not see', named);
    ELSIF (SELECT count(DISTINCT k) < count(*) FROM unnest(key) AS k) THEN
        fault := format('its key (%s) has a column twice', named);
    ELSIF cardinality(key) > 1 AND EXISTS (
            SELECT FROM pg_attribute a WHERE a.attrelid = tbl AND a.attname = ANY (key) AND NOT a.attnotnull) THEN
        fault := format('its key (%s) has a column that may be NULL, and a row with a NULL has no key', named);
    ELSE
        SELECT coalesce(format('its key is (%s), and ', named) || tube_key_fault(types), (
                SELECT format('its key in tube %L is (%s) and not (%s), and {table}_touch can have one only', a.tube,
                    array_to_string(a.key, ', '), named)
                FROM tube_attachment a
                WHERE a.tbl = tube_check_key.tbl AND a.tube <> t.tube AND a.key <> tube_check_key.key LIMIT 1))
            INTO fault;
    END IF;
    IF fault IS NOT NULL THEN
        PERFORM tube_refuse('RT005', format('table %s cannot be attached to tube %L: %s', tbl, t.tube, fault),
            'name the columns that identify a row as the key: --key COLUMN[,COLUMN], or key => ''{COLUMN,COLUMN}'' in SQL');
    ELSIF tube_key_kind(types) = 'text' AND t.keys = 'bigint' THEN
        PERFORM tube_refuse('RT005', format('table %s cannot be attached to tube %L, which has keys of kind bigint: its key '
                '(%s) is %s', tbl, t.tube, named, array_to_string(types, ', ')),
            'attach it to a tube with keys of kind text: replicad tubes create TUBE --keys text. Or name one integer column '
            'as the key: --key COLUMN');
    END IF;
END
$$;

-- tube_key_fault(types): why values of these types cannot be a key; NULL if they can. Backfills sort by the key. Writes
-- nothing.
CREATE OR REPLACE FUNCTION tube_key_fault(types text[]) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    type text;
BEGIN
    FOREACH type IN ARRAY types LOOP
        BEGIN
            EXECUTE format('SELECT FROM (SELECT NULL::%s AS k) AS one WHERE k > NULL::%1$s ORDER BY k', type);
        EXCEPTION WHEN undefined_function OR datatype_mismatch OR ambiguous_function THEN
            RETURN format('its type %s has no order', type);
        END;
    END LOOP;
    RETURN NULL;
END
$$;
