"""For programs that write streams: reserving ids and publishing positions, on trio and without async."""
