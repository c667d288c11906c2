"""The sender: delivers facts and updates of streams to many HTTP destinations, each in order (docs/sender.md).

`destination` decides (no I/O), `store` keeps the state in Postgres, `transport` sends HTTP requests, `sender` combines
them. A destination that is down does not delay the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.sender.routing import Fact, Update
    from replicad.sender.signing import verify

__all__ = [
    "Fact",
    "Update",
    "verify",
]

__getattr__ = exported(
    __name__,
    {
        **dict.fromkeys(("Fact", "Update"), "routing"),
        "verify": "signing",
    },
)
