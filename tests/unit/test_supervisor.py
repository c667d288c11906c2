"""What a service manager is told, and when a watchdog is fed."""

from __future__ import annotations

import math
import socket
from pathlib import Path

import pytest
import structlog
import trio
from trio.testing import MockClock

from replicad.daemon.process import Supervisor


@pytest.mark.parametrize(
    ("environment", "silence"),
    [
        ({}, math.inf),
        ({"WATCHDOG_USEC": "30000000"}, math.inf),  # nowhere to say it
        ({"NOTIFY_SOCKET": "/run/s", "WATCHDOG_USEC": "30000000"}, 30.0),
        ({"NOTIFY_SOCKET": "/run/s", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"NOTIFY_SOCKET": "/run/s", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, math.inf),  # of another process
        ({"NOTIFY_SOCKET": "/run/s", "WATCHDOG_USEC": "soon"}, math.inf),
        ({"NOTIFY_SOCKET": "/run/s", "WATCHDOG_USEC": "0"}, math.inf),
    ],
)
def test_a_watchdog_counts_if_it_is_for_this_process(environment: dict[str, str], silence: float) -> None:
    assert Supervisor.of(environment, 7).silence == silence


async def test_a_watchdog_hears_twice_in_its_time(tmp_path: Path, autojump_clock: MockClock) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        with trio.move_on_after(31):
            await Supervisor(str(tmp_path / "notify"), 30.0).run()
        assert (manager.recv(100), manager.recv(100)) == (b"WATCHDOG=1", b"WATCHDOG=1")
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_a_service_manager_that_is_gone_is_logged_and_ends_nothing(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        Supervisor(str(tmp_path / "gone")).tell("READY=1")
    assert [line["event"] for line in logs] == ["supervisor_not_notified"]
