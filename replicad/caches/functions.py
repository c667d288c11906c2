"""Cached functions, plain and async: from arguments to keys, and loads with tickets."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, cast

from replicad.caches.cache import Cache
from replicad.caches.keys import Key, freeze
from replicad.caches.storage import MISSING

P = ParamSpec("P")
R = TypeVar("R")

_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def cached_function(cache: Cache, function: Callable[P, R], key: Callable[..., Iterable[Any]] | None) -> Callable[P, R]:
    """The function with the cache in front. Raises TypeError if its signature does not determine the keys."""
    key_of = key_maker(function) if key is None else lambda args, kwargs: freeze(key(*args, **kwargs))
    if inspect.iscoroutinefunction(function):
        return cast("Callable[P, R]", _async(cache, function, key_of))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        entry = key_of(args, kwargs)
        value = cache.get(entry)
        if value is not MISSING:
            return cast("R", value)
        ticket = cache.begin(entry)
        try:
            value = function(*args, **kwargs)
        except BaseException:
            cache.abandon(ticket)
            raise
        cache.store(ticket, value)
        return value

    return call


def _async(
    cache: Cache, function: Callable[..., Any], key_of: Callable[[tuple[Any, ...], dict[str, Any]], Key]
) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        entry = key_of(args, kwargs)
        value = cache.get(entry)
        if value is not MISSING:
            return value
        ticket = cache.begin(entry)
        try:
            value = await function(*args, **kwargs)
        except BaseException:
            cache.abandon(ticket)
            raise
        cache.store(ticket, value)
        return value

    return call


def key_maker(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Key]:
    """From the arguments of a call to the key of the entry: all of them in the order of the signature, defaults filled
    in.

    Raises:
        TypeError: the function takes any number of arguments, so the number of keys is not known.
    """
    signature = inspect.signature(function)
    if any(parameter.kind in _OPEN for parameter in signature.parameters.values()):
        raise TypeError(
            f"{function.__qualname__}{signature} takes any number of arguments: give key=, which names keys"
        )
    count = len(signature.parameters)
    positional = all(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in signature.parameters.values())

    def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
        if positional and not kwargs and len(args) == count:
            return freeze(args)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return freeze(bound.arguments.values())

    return key_of
