"""Parses pods from the RDATA lines in the answer to PODS."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NamedTuple

from replicad.errors import RemoteProtocolError


class Pod(NamedTuple):
    """A pod of a tube: ids that were touched by one operation in one shard.

    `op` is I, U, D, T or B (backfill). A control pod has no ids and a payload. `ts` is when it was written, with a
    time zone.
    """

    seq: int
    op: str
    shard: int
    ids: list[int]
    payload: Any
    ts: datetime


def parse_pods(lines: bytes) -> list[Pod]:
    """The pods of whole RDATA lines, newlines included, in their order.

    Raises:
        RemoteProtocolError: a row is not the JSON of a pod.
    """
    # `RDATA tube:t 0/2 17 {...}`: the row is the text after the fourth space. One call parses all rows.
    rows = [line.split(b" ", 4)[4] for line in lines.split(b"\n")[:-1]]
    try:
        return [_pod(row) for row in json.loads(b"[" + b",".join(rows) + b"]")]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RemoteProtocolError(f"a pod is not JSON of the form that was agreed on: {error!r:.300}") from error


def garbage_before(payload: Any) -> int | None:
    """The `start_seq` in the payload of a control pod that ends a backfill; None for any other payload.

    Rows of the shard that a downstream wrote for a touch with a lower seq are garbage.
    """
    if not isinstance(payload, dict) or payload.get("type") != "backfill_end":
        return None
    found = str(payload.get("start_seq", ""))
    return int(found) if found.isdecimal() else None


def _pod(row: dict[str, Any]) -> Pod:
    ts = datetime.fromisoformat(row["ts"])
    return Pod(row["seq"], row["op"], row["shard"], row["ids"], row.get("payload"), ts)
