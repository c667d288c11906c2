"""Signals while the files of access are read again."""

from __future__ import annotations

import signal

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from replicad.daemon.process import stop_on_signal

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no SIGHUP here")


class Reading:
    """A reload that lasts until the test lets it end."""

    def __init__(self) -> None:
        self.begun = 0
        self.goes_on = trio.Event()

    async def reload(self) -> bool:
        self.begun += 1
        await self.goes_on.wait()
        return True


async def test_signals_during_a_reload_lead_to_one_more_and_a_stop_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr("sys.stderr", None)  # a terminal, where SIGHUP stops the daemon
    reading, stopped = Reading(), trio.Event()
    await nursery.start(stop_on_signal, stopped.set, reading.reload)
    for _ in range(5):
        signal.raise_signal(signal.SIGHUP)
        await wait_all_tasks_blocked()
    assert reading.begun == 1
    signal.raise_signal(signal.SIGTERM)
    with trio.fail_after(10):
        await stopped.wait()
    reading.goes_on.set()
    await wait_all_tasks_blocked()
    assert reading.begun == 2, "what was written during the first one is read"
    nursery.cancel_scope.cancel()
