"""Run the async work of a command to its end, or to Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from types import FrameType

    import trio

T = TypeVar("T")


def run_async(work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` in trio and return its result. Ctrl-C cancels it, so that its clean-up runs; a second one kills.

    By default Python raises KeyboardInterrupt wherever the program is at that moment. Inside a callback of the driver
    it leaves a connection for whose answer somebody waits for ever, or ends the interpreter.

    Raises:
        KeyboardInterrupt: it was cancelled, whatever the clean-up raised.
    """
    import trio

    scope = trio.CancelScope()
    token: trio.lowlevel.TrioToken | None = None
    interrupted = False

    def interrupt(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(number, signal.SIG_DFL)
        if token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(scope.cancel)

    async def cancellable() -> T:
        nonlocal token
        token = trio.lowlevel.current_trio_token()
        if interrupted:
            scope.cancel()
        with scope:
            return await work()
        raise KeyboardInterrupt

    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else the program has its own way
    if handled:
        signal.signal(signal.SIGINT, interrupt)
    try:
        return trio.run(cancellable)
    except Exception as error:
        if interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
