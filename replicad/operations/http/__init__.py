"""`serve --http`: health checks, the daemon's state as JSON, and metrics for Prometheus. Imported when asked for."""
