"""Commands for operators, and what `serve --http` answers."""
