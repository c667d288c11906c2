"""The pipeline of the demonstration: its configuration, its process, and its counts so far."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import trio

from replicad.config.settings import Address
from replicad.demo.processes import clean_environment, last_line, running
from replicad.errors import EnvironmentRefused

TUBE = "cities"
_COUNTED = ("pods", "ids", "written", "deleted")  # fields of the event `batch_done`
CONFIG = """\
# The pipeline of the demonstration. Run it again with: replicad pipeline run {path}

[source]                      # options of spark.readStream.format("replicad")
tube = "{tube}"
host = "{host}"
port = {port}
maxBackfillPodsPerTrigger = 100

[enrich]                      # where the rows of the touched ids are; REPLICAD_DATABASE overrides it
database = "{database}"
table = "shard_{{shard:04d}}.cities"

[downstream]
kind = "parquet"
folder = "downstream"

[run]
checkpoint = "checkpoint"
trigger = "500ms"
"""


@dataclass
class RunningPipeline:
    """A running pipeline, and the sums of the counts that it has logged: batches, pods, ids, written, deleted."""

    process: trio.Process
    log: Path
    counts: Counter[str] = field(default_factory=Counter)
    _file: IO[str] | None = field(default=None, repr=False)
    _rest: str = ""

    def update(self) -> None:
        """Add the counts that were logged since the last call.

        Raises:
            EnvironmentRefused: the pipeline has ended; the message has the last line of its log.
        """
        self._file = self._file or self.log.open(encoding="utf-8", errors="replace")
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and event.get("event") == "batch_done":
                self.counts.update({"batches": 1, **{name: event[name] for name in _COUNTED}})
        if self.process.poll() is not None:
            raise EnvironmentRefused(f"the pipeline ended: {last_line(self.log)} (its log is {self.log})")


def write_config(folder: Path, server: Address, database: str) -> Path:
    """Write the pipeline's configuration into the folder and return its path."""
    path = folder / "pipeline.toml"
    text = CONFIG.format(path=path, tube=TUBE, host=server.host, port=server.port, database=database)
    path.write_text(text, encoding="utf-8")
    return path


@asynccontextmanager
async def running_pipeline(folder: Path, config: Path, url: str) -> AsyncIterator[RunningPipeline]:
    """Run the pipeline in another process, with its logs in the folder, until the end of the block."""
    log = folder / "pipeline.log"
    command = [
        sys.executable, "-m", "replicad", "pipeline", "run", str(config),
        "--log-format", "json", "--spark-log", str(folder / "spark.log"),
    ]  # fmt: skip
    async with running(command, log, clean_environment(REPLICAD_DATABASE=url)) as process:
        yield RunningPipeline(process, log)
