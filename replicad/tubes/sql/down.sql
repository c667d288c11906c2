-- What the functions made outside of this schema goes with the tubes: triggers and {table}_touch functions.
SELECT tube_ensure_absent(tube) FROM tube_registry ORDER BY tube
