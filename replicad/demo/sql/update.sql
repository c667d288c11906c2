-- A census: every tenth city of the shard (by id) has grown, and a few of them were renamed.
UPDATE cities
SET population = population + 1 + population / 50,
    name = CASE WHEN id % 200 = 0 THEN 'New ' || name ELSE name END,
    updated_at = clock_timestamp()
WHERE id % 10 = 0
