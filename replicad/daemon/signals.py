"""Which signals end the daemon and which do it no harm. By default nearly each of them ends a process without a word.

SIGTERM and SIGINT stop the daemon. So does SIGHUP where stderr is a terminal, since that comes when it is closed;
elsewhere it is ignored like the others of HARMLESS, and logged. SIGQUIT stays what it is: the end at once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import structlog
import trio

STOPPING = (signal.SIGTERM, signal.SIGINT)
HARMLESS = (
    *(signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO),  # timers and the like, which we do not use
)  # SIGPIPE and SIGXFSZ are ignored by Python already

log = structlog.get_logger()


@contextmanager
def interruptible() -> Iterator[None]:
    """Until trio takes the signals over, SIGTERM unwinds like Ctrl-C, so that a starting Postgres is stopped again."""
    handlers: dict[signal.Signals, Callable[[int, FrameType | None], object]] = {
        signal.SIGTERM: signal.default_int_handler
    }
    for number in _not_ignored():
        handlers[number] = signal.default_int_handler if _stops(number) else _do_nothing
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterruptible() -> Iterator[None]:
    """While the embedded Postgres is stopped, which is bounded: a second Ctrl-C must not leave it behind."""
    before = [signal.signal(number, signal.SIG_IGN) for number in STOPPING]
    try:
        yield
    finally:
        for number, handler in zip(STOPPING, before, strict=True):
            signal.signal(number, handler)


async def stop_on_signal(
    stop: Callable[[], None], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call `stop` for each signal that asks for it, and log the others, until cancelled."""
    deadly = {number for number in (*STOPPING, *HARMLESS) if _stops(number)}  # asked now: a closed terminal is none
    with trio.open_signal_receiver(*STOPPING, *_not_ignored()) as signals:
        task_status.started()
        async for number in signals:  # also those that come while we stop already: they must not cut it short
            name = signal.Signals(number).name
            if number in deadly:
                log.info("stopping", signal=name)
                stop()
            else:
                log.warning("signal_ignored", signal=name, remedy="SIGTERM and SIGINT stop the daemon")


def _not_ignored() -> list[signal.Signals]:
    """Those of HARMLESS that whoever started us did not switch off, as nohup does with SIGHUP."""
    return [number for number in HARMLESS if signal.getsignal(number) is not signal.SIG_IGN]


def _stops(number: signal.Signals) -> bool:
    return number in STOPPING or (number is signal.SIGHUP and sys.stderr is not None and sys.stderr.isatty())


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    pass
