"""Tubes from Python: leases, pods, acks; the SQL that they call stands in `tubes/sql`."""
