"""Tells systemd, or whoever started the daemon in its way, that it is ready, lives and stops.

The form is that of sd_notify(3): datagrams to the socket that NOTIFY_SOCKET names. Without it nothing is sent.
A supervisor that sets WATCHDOG_USEC ends a daemon that is silent for so long; the event loop speaks twice in that time.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import structlog
import trio

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Supervisor:
    """`address`: where to send, None for nowhere. `silence`: seconds after which it ends us, infinite for never."""

    address: str | None = None
    silence: float = math.inf

    @classmethod
    def of(cls, environment: Mapping[str, str], pid: int) -> Supervisor:
        """From the variables that a service manager sets; the variables of WATCHDOG count only if they are for this
        process.
        """
        address = environment.get("NOTIFY_SOCKET") or None
        if address is not None and address.startswith("@"):
            address = "\0" + address[1:]  # a name that is no file
        micros = environment.get("WATCHDOG_USEC", "")
        ours = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
        watches = address is not None and ours and micros.isascii() and micros.isdigit() and int(micros) > 0
        return cls(address, int(micros) / 1e6 if watches else math.inf)

    def tell(self, *assignments: str) -> None:
        """Send assignments such as READY=1; a failure is logged, since no caller would notice it."""
        if self.address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as door:
                door.connect(self.address)
                door.send("\n".join(assignments).encode())
        except OSError as error:
            log.warning("supervisor_not_notified", assignment=assignments[0], error=str(error))

    async def run(self) -> None:
        """Say that the event loop turns, until cancelled."""
        while True:
            await trio.sleep(self.silence / 2)
            self.tell("WATCHDOG=1")


def take_supervisor() -> Supervisor:
    """The manager that started this process. Its variables are removed: a Postgres that we start would answer too."""
    found = Supervisor.of(os.environ, os.getpid())
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        os.environ.pop(name, None)
    return found
