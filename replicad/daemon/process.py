"""Which signals stop the daemon and which are ignored. By default nearly each of them ends a process with no message.

SIGTERM and SIGINT stop the daemon. So does SIGHUP if stderr is a terminal, because it is sent when the terminal is
closed; otherwise the daemon reads its files of access again, if it has any. The others of HARMLESS are logged and
ignored. SIGQUIT keeps its default: it ends the process.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import structlog
import trio

# Tells systemd, or whoever started the daemon in its way, that it is ready, lives and stops.
#
# The form is that of sd_notify(3): datagrams to the socket that NOTIFY_SOCKET names. Without it nothing is sent. A
# supervisor that sets WATCHDOG_USEC ends a daemon that is silent for so long; the event loop speaks twice in that
# time.


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


# Looks for garbage in reference cycles: for new objects a hundred times a second, for all of them rarely.
#
# Python by itself looks when the new objects that are left have reached a number. That number counts every object
# that goes, so while thousands of clients come and go it is reached late, and one look at all that is new has then
# stopped the event loop for 200 to 400 ms. Looked at every ten milliseconds, the same objects cost the same time in
# all, a millisecond or two at once. Sessions leave no cycles, so looking at all objects, which takes half a
# microsecond for each, is rarely of use. With 10,000 sessions it stops the event loop for seconds. So it begins only
# when it takes no larger share of the time than it may, by the number of tasks.


YOUNG = 0.01  # seconds between two looks at new objects
ALL = 60.0  # seconds between two looks at all objects
SHARE = 0.001  # of the time at most for these: a look that took 0.2 s is followed by 200 s without one
TASK = 1e-4  # seconds for the objects of one task and its part of a session
_NEW, _EVERY = 1, 2  # generations of the `gc` module


def _tasks_living() -> int:
    return trio.lowlevel.current_statistics().tasks_living


class CycleCollector(trio.abc.Instrument):
    """Collects at the end of a turn of the event loop, when nothing waits in the middle of its work.

    For `trio.run(..., instruments=[...])`. Python's own collections end when it begins.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        collect: Callable[[int], object] = gc.collect,
        tasks: Callable[[], int] = _tasks_living,
    ) -> None:
        """`collect` looks at a generation and at all younger ones. `tasks`: how many live."""
        self._clock = clock
        self._collect = collect
        self._tasks = tasks
        self._young_at = float("-inf")
        self._looked_at = clock()  # at all objects
        self._all_at = self._looked_at + ALL

    def before_run(self) -> None:
        """The run begins."""
        gc.disable()

    def after_run(self) -> None:
        """The run has ended."""
        gc.enable()

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - what trio calls it with
        """A turn ends."""
        now = self._clock()
        if now >= self._all_at and now < self._looked_at + self._tasks() * TASK / SHARE:
            self._all_at = now + ALL  # fewer may live then
        elif now >= self._all_at:
            self._collect(_EVERY)
            done = self._looked_at = self._clock()
            self._all_at = done + max(ALL, (done - now) / SHARE)
            self._young_at = done + YOUNG
        elif now >= self._young_at:
            self._collect(_NEW)
            self._young_at = self._clock() + YOUNG


# Gives free memory back to the system after a rush.
#
# The allocator of glibc keeps what lies below the last byte in use: hundreds of megabytes after thousands of clients
# that sent half a line each. Python has lists of free objects beside it, thousands that lie all over the memory of a
# rush and keep its pages. Elsewhere (musl, macOS) nothing is done.
#
# Python's own allocator has blocks of 1 MiB, and each stays as long as one small object in it lives. So the unit and
# the image start the daemon with PYTHONMALLOC=malloc (docs/limits.md, "Sizing").


LOOK = 2.0  # seconds
SPARE = 4 << 20  # bytes that may be free; the next rush needs them again
CALM = 500  # tasks; with so many a collection of all objects takes up to 50 ms


async def give_back_forever(allocator: GlibcAllocator, calm: int = CALM) -> None:
    """Give memory back that is free at two looks one after the other, until cancelled.

    Python's lists are emptied before. While more than `calm` tasks live that takes too long. Then memory is given back
    once more when fewer live, or when the collector of cycles has looked at all objects, which empties the lists too.
    """
    kept = last = 0  # bytes that were free after it was given back last, and at the last look
    full: int | None = None  # collections of all objects when it was given back last, if the lists were full then
    while True:
        await trio.sleep(LOOK)
        free = allocator.free()
        kept = min(kept, free)
        is_calm = _tasks_living() <= calm
        if min(free, last) > kept + SPARE or (full is not None and (is_calm or _collections() > full)):
            emptied = is_calm or (full is not None and _collections() > full)
            if is_calm:
                await trio.lowlevel.checkpoint()  # the look at free memory took up to 20 ms
                gc.collect()
            full = None if emptied else _collections()
            await trio.to_thread.run_sync(allocator.give_back)
            log.debug("memory_given_back", free=free, before=kept)
            kept = allocator.free()
        last = free


def _collections() -> int:
    """How often all objects were looked at, and Python's lists of free ones emptied."""
    return int(gc.get_stats()[-1]["collections"])


def allocator_of_this_process() -> GlibcAllocator | None:
    """None: it is not that of glibc 2.33 and newer."""
    library = ctypes.CDLL(None)
    return GlibcAllocator(library) if hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim") else None


class _Figures(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


class GlibcAllocator:
    """The allocator of glibc, which gets memory from the system."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._figures = library.mallinfo2
        self._figures.restype = _Figures
        self._trim = library.malloc_trim
        self._trim.argtypes = [ctypes.c_size_t]

    def free(self) -> int:
        """Bytes that nothing is in, given back or not."""
        return int(self._figures().fordblks)

    def give_back(self) -> None:
        """Return free memory to the system. Takes up to a tenth of a second for hundreds of megabytes."""
        self._trim(0)


STOPPING = (signal.SIGTERM, signal.SIGINT)
HARMLESS = (
    *(signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO),  # timers and the like, which we do not use
)  # SIGPIPE and SIGXFSZ are ignored by Python already


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
