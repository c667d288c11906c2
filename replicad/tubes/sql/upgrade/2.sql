-- Each of them was called for each partition by tube_stats, which was slow; tube_figures has taken their place.
DROP FUNCTION IF EXISTS tube_count(tube_registry, integer, boolean, integer);
DROP FUNCTION IF EXISTS tube_count_control(text, integer, integer);
