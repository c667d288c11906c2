"""replicad: changes out of Postgres to the processes that need them.

What a program imports logs through the standard `logging`, to loggers below `replicad` (see `eventlog`). Nothing is
printed before the program configures them.
"""

import logging
from importlib.metadata import version

__version__: str = version("replicad")

logging.getLogger("replicad").addHandler(logging.NullHandler())
