"""A worker of Synapse that also writes down what its replication has taken: one JSON line each in the first argument.

Runs in the Python of Synapse. Nothing of Synapse is replaced; what is written down has been processed by it before.
"""

import json
import sys
from pathlib import Path
from typing import Any

from synapse.app.generic_worker import main  # type: ignore[import-not-found]
from synapse.replication.tcp.client import ReplicationDataHandler  # type: ignore[import-not-found]

taken = Path(sys.argv.pop(1))
taken.touch()
process = ReplicationDataHandler.on_rdata


async def on_rdata(self: Any, stream: str, instance: str, token: int, rows: list[Any]) -> None:
    await process(self, stream, instance, token, rows)
    write_down([stream, instance, token, [str(row) for row in rows]])


def write_down(line: list[Any]) -> None:
    with taken.open("a") as file:
        file.write(json.dumps(line) + "\n")


ReplicationDataHandler.on_rdata = on_rdata
main()
