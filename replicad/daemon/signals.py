"""Which signals stop the daemon and which are ignored. By default nearly each of them ends a process with no message.

SIGTERM and SIGINT stop the daemon. So does SIGHUP if stderr is a terminal, because it is sent when the terminal is
closed; otherwise the daemon reads its files of access again, if it has any. The others of HARMLESS are logged and
ignored. SIGQUIT keeps its default: it ends the process.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
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
    """Until trio handles the signals, SIGTERM raises like Ctrl-C, so that a Postgres that is starting is stopped."""
    handlers: dict[signal.Signals, Callable[[int, FrameType | None], object]] = {
        signal.SIGTERM: signal.default_int_handler
    }
    for number in _handled():
        handlers[number] = signal.default_int_handler if _stops(number) else _do_nothing
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterruptible() -> Iterator[None]:
    """Ignore signals while the embedded Postgres is stopped (a bounded time), so that it is not left running."""
    before = [signal.signal(number, signal.SIG_IGN) for number in STOPPING]
    try:
        yield
    finally:
        for number, handler in zip(STOPPING, before, strict=True):
            signal.signal(number, handler)


async def stop_on_signal(
    stop: Callable[[], None],
    reload: Callable[[], Awaitable[object]] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call `stop` for each signal that asks for it, and log the others, until cancelled.

    `reload` is called for SIGHUP; None: there is nothing to read. Signals during it lead to one more call of it, and
    delay no stop.
    """
    stopping = {number for number in (*STOPPING, *HARMLESS) if _stops(number)}  # now: isatty() fails once it is closed
    hung_up, wanted = trio.open_memory_channel[None](1)
    async with trio.open_nursery() as nursery:
        if reload is not None:
            nursery.start_soon(_reload_for_each, wanted, reload)
        with trio.open_signal_receiver(*STOPPING, *_handled()) as signals:
            task_status.started()
            async for number in signals:  # also during the stop, so that none of them ends the process
                name = signal.Signals(number).name
                if number in stopping:
                    log.info("stopping", signal=name)
                    stop()
                elif number == signal.SIGHUP and reload is not None:
                    with suppress(trio.WouldBlock):  # the one that waits reads what is there then
                        hung_up.send_nowait(None)
                else:
                    log.warning("signal_ignored", signal=name, remedy="SIGTERM and SIGINT stop the daemon")


async def _reload_for_each(wanted: trio.MemoryReceiveChannel[None], reload: Callable[[], Awaitable[object]]) -> None:
    async for _ in wanted:
        await reload()


def _handled() -> list[signal.Signals]:
    """The signals of HARMLESS that the parent process has not set to be ignored.

    nohup does that with SIGHUP. It is handled all the same if it only has files read again.
    """
    return [
        number
        for number in HARMLESS
        if signal.getsignal(number) is not signal.SIG_IGN or (number is signal.SIGHUP and not _stops(number))
    ]


def _stops(number: signal.Signals) -> bool:
    return number in STOPPING or (number is signal.SIGHUP and sys.stderr is not None and sys.stderr.isatty())


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    pass
