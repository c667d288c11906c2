-- Dropping the tubes also drops what their functions created outside of this schema: triggers and {table}_touch
-- functions.
SELECT tube_ensure_absent(tube) FROM tube_registry ORDER BY tube
