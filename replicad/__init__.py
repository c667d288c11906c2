"""replicad: changes out of Postgres to the processes that need them."""

from importlib.metadata import version

__version__: str = version("replicad")
