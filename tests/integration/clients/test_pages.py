"""The programs for asyncio that pages of the documentation show, run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import PATIENCE
from tests.source import ROOT

from .fake import FakeDaemon
from .world import World

USUAL = '"127.0.0.1", 9009'  # where the pages say that the daemon listens


def program(page: str, holds: str) -> str:
    """The one block of Python on the page with that text in it."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if holds in block]
    return str(found)


def test_the_follower_on_asyncio_prints_the_rows(fake: FakeDaemon, world: World, tmp_path: Path) -> None:
    world.commit("events", "w1", '{"a":1}')
    file = tmp_path / "program.py"
    text = program("docs/streams.md", "asyncio.run(main())")
    assert USUAL in text
    file.write_text(text.replace(USUAL, f'"127.0.0.1", {fake.port}'))
    with subprocess.Popen([sys.executable, "-u", str(file)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("RowBatch(stream='events', instance='w1'")
        finally:
            process.kill()
            process.wait(PATIENCE)
