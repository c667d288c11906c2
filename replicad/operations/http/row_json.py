"""A row as JSON, made of its line of RDATA: `{"instance":"master","token":54,"row":...}`. The row stays as it is."""

from __future__ import annotations

import json
from functools import lru_cache


def row_json(instance: bytes, token: bytes, row: bytes) -> bytes:
    """The JSON of a line of RDATA, on one line. `token` is null if more rows with the same token follow (`batch`)."""
    return b"".join((_opening(instance), b"null" if token == b"batch" else token, b',"row":', row, b"}"))


@lru_cache(maxsize=1024)
def _opening(instance: bytes) -> bytes:
    return b'{"instance":%s,"token":' % json.dumps(instance.decode(), ensure_ascii=False).encode()
