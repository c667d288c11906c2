"""How far each watched table may be read: the rule of lock-watch, what a poll reads, and the wait between two polls.

docs/positions.md has the argument.
"""
