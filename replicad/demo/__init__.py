"""The demonstration: cities of the world in shard schemas, a tube on them, and a copy of them kept by Spark."""
