"""Exceptions out of exception groups: a nursery wraps what its tasks raise, and callers want the error itself.

Pure functions, for every floor; `nurseries` uses them for trio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions inside of (nested) exception groups, in order; an exception alone is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def sole_leaf(error: BaseException) -> BaseException:
    """The one exception inside of (nested) groups; the error itself where it is none, or a group of several."""
    found = leaves(error)
    return found[0] if len(found) == 1 else error


class Reporting:
    """Report the exception that the block raises instead of raising it. A cancellation still passes.

    A group of both (a cancellation and a failure at the same moment) is split: the failure is reported. Each connection
    is inside of two of these blocks; generators (`contextmanager`) would take five times the memory.
    """

    __slots__ = ("_report",)

    def __init__(self, report: Callable[[Exception], None]) -> None:
        self._report = report

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            self._report(error)
            return True
        if not isinstance(error, BaseExceptionGroup):
            return False
        failed, rest = error.split(Exception)
        if failed is not None:
            self._report(failed)
        if rest is not None:
            raise rest from None
        return True


def raise_as_it_was(error: BaseException) -> NoReturn:
    """Raise an exception that was taken out of a group, with its own context: the group is not mentioned."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error, context  # a traceback refers to this frame: without this they would be a cycle
