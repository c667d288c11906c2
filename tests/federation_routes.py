"""A routing function as a user would write it."""

from __future__ import annotations

from typing import Any

from replicad.sender.routing import Fact


def route(stream: str, token: int, row: Any) -> Fact | None:
    return Fact([row["to"]], body={"token": token, "stream": stream}) if "to" in row else None
