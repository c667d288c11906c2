"""What should be in a database, as a file says it: `replicad plan`, `apply` and `export`.

Each feature declares its part of the file as a `Section` (section.py). Reading, comparing and writing know no feature.
"""
