"""Tubes: leases, pods, acks, backfill. They call the SQL functions of `tubes/sql`."""
