"""How long tests are: short in the suite, which runs often and with other examples each time; long in `make stress`."""

from __future__ import annotations

import os
from typing import Final

LONG: Final = bool(os.environ.get("REPLICAD_STRESS_SECONDS"))  # `make stress` asks for the long tests too
SHARE: Final = 10 if LONG else 0.4


def examples(number: int) -> int:
    """How many examples hypothesis tries where a thorough look takes this many."""
    return max(10, round(number * SHARE))
