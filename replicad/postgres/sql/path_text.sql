    SELECT string_agg(part, ', ' ORDER BY place)
    FROM (
        SELECT quote_ident(given.name) AS part, min(given.place) AS place
        FROM unnest(path) WITH ORDINALITY AS given(name, place) GROUP BY given.name
        UNION ALL SELECT 'pg_temp', 1 + coalesce(cardinality(path), 0)
    ) AS parts
