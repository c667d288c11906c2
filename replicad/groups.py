"""Exceptions out of exception groups: a nursery wraps what its tasks raise, and callers want the error itself.

Pure functions, for every floor; `nurseries` uses them for trio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def reporting(report: Callable[[Exception], None]) -> Iterator[None]:
    """Report the exception that the block raises instead of raising it. A cancellation still passes.

    A group of both (a cancellation and a failure at the same moment) is split: the failure is reported.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - reported
        report(error)
    except BaseExceptionGroup as group:
        failed, rest = group.split(Exception)
        if failed is not None:
            report(failed)
        if rest is not None:
            raise rest from None


def raise_as_it_was(error: BaseException) -> NoReturn:
    """Raise an exception that was taken out of a group, with its own context: the group is not mentioned."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error, context  # a traceback refers to this frame: without this they would be a cycle
