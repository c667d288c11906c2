"""The example for Spark's listeners counts what waits from the offsets that the source reports."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replicad.protocol.tokens import Cursor
from replicad.spark.offsets import TubeCursor, TubeOffset

FILE = Path(__file__).parents[2] / "docs/examples/waiting_pods.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("waiting_pods", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def offset(*pods: int) -> dict[str, Any]:
    return TubeOffset(tuple(TubeCursor(Cursor(9, 0), count) for count in pods)).to_json("t", 1)


def test_the_pods_that_wait_are_those_between_the_two_offsets() -> None:
    pytest.importorskip("pyspark", reason="`make unit` installs no PySpark")
    told: list[tuple[str | None, int]] = []
    listener = example().WaitingPods(lambda *found: told.append(found))

    def progress(latest: object, end: object) -> None:
        source = SimpleNamespace(latestOffset=json.dumps(latest), endOffset=json.dumps(end))
        listener.onQueryProgress(SimpleNamespace(progress=SimpleNamespace(name="q", sources=[source])))

    progress(offset(10, 7), offset(10, 2))
    progress({"i": {"a": offset(3), "b": offset(4)}, "v": 1}, {"i": {"a": offset(1), "b": offset(4)}, "v": 1})
    progress(offset(5), offset(5))
    progress(None, offset(5))
    progress({"t": "58~2.61", "v": 1}, {"t": "58", "v": 1})
    assert told == [("q", 5), ("q", 2), ("q", 0)]
