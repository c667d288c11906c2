-- The orders of the demonstration in browsers.

-- name: demo_shop
-- A table of the orders of two customers.
DROP TABLE IF EXISTS orders CASCADE;
CREATE TABLE orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer_id integer NOT NULL,
    item text NOT NULL,
    state text NOT NULL DEFAULT 'new'
);
INSERT INTO orders (customer_id, item) SELECT 42 + i % 2, 'item ' || i FROM generate_series(1, 8) AS i

-- name: demo_shop_change
-- A new order for either customer, the next state of some order, another customer for some order, and the oldest order
-- goes.
WITH added AS (
    INSERT INTO orders (customer_id, item) SELECT 42 + (random() * 9)::integer % 2, 'item ' || (random() * 999)::integer
), oldest AS (
    DELETE FROM orders WHERE id = (SELECT min(id) FROM orders HAVING count(*) > 12)
)
UPDATE orders AS o
SET state = CASE o.state WHEN 'new' THEN 'paid' WHEN 'paid' THEN 'sent' ELSE 'new' END,
    customer_id = CASE WHEN random() < 0.1 THEN 85 - o.customer_id ELSE o.customer_id END
FROM (SELECT id FROM orders OFFSET 1 LIMIT 100) AS a
WHERE o.id = a.id AND random() < 0.3
