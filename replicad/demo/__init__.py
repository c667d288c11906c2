"""The demonstration: cities of the world in schemas of shards, a tube for them, and a copy that Spark keeps in step."""
