"""The command line: `replicad COMMAND`, one file per command or group of commands.

Start-up must be fast, because a health check runs every few seconds. So trio, asyncpg and pyspark are imported only
when a command that needs them runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line on `arguments` (default: the process's own) and exit with its status."""
    try:
        from replicad.cli.app import run
    except KeyboardInterrupt:  # Ctrl-C while it starts; `run` handles later ones
        sys.exit(130)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
