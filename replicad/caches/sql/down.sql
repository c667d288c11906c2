-- The stream would be served no longer, and say so for ever.
SELECT cache_disable()
