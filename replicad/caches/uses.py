"""Refuses wrong uses of the caches where they are written: most of them would make values stale in silence."""

from __future__ import annotations

import math
import reprlib

from replicad.caches.storage import Storage

LONGEST_NAME = 200  # characters, as of SQL's invalidate_cache()


def name_of(found: object, what: str = "a cache") -> str:
    """The name of a cache or group. Raises TypeError: it is none, but perhaps the function itself."""
    if not isinstance(found, str) or not 0 < len(found) <= LONGEST_NAME:
        hint = f': its name "{found.__name__}" is meant' if hasattr(found, "__name__") else ""
        raise TypeError(f"{what} is named by a text of 1 to {LONGEST_NAME} characters, not {reprlib.repr(found)}{hint}")
    return found


def seconds(found: object, name: str, *, lowest: float) -> float:
    """A number of seconds, infinite too. Raises TypeError: it is none, or below `lowest`."""
    if not isinstance(found, int | float) or isinstance(found, bool) or math.isnan(found) or found < lowest:
        raise TypeError(f"{name} is a number of seconds, at least {lowest:g}, not {reprlib.repr(found)}")
    return float(found)


def storage_of(found: object) -> Storage:
    """A storage. Raises TypeError: it lacks a method of a mapping."""
    methods = ("get", "__setitem__", "pop", "clear", "__len__")
    if isinstance(found, type) or not all(callable(getattr(found, name, None)) for name in methods):
        raise TypeError(f"storage= is an object like a dict or a cache of cachetools, not {reprlib.repr(found)}")
    return found  # type: ignore[return-value]
