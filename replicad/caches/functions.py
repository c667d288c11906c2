"""Cached functions, plain and async: from arguments to keys, and loads with tickets."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, ParamSpec, TypeVar, cast

from replicad.caches.cache import Cache
from replicad.caches.keys import Entry, Key, freeze
from replicad.caches.storage import MISSING

P = ParamSpec("P")
R = TypeVar("R")

_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def cached_function(cache: Cache, function: Callable[P, R], key: Callable[..., Entry] | None) -> Callable[P, R]:
    """The function with the cache in front.

    Raises TypeError if its signature does not determine the keys, or if it makes generators.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__} makes generators, which can be used once: return a list instead")
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
            value = _lasting(function, function(*args, **kwargs))
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
            value = _lasting(function, await function(*args, **kwargs))
        except BaseException:
            cache.abandon(ticket)
            raise
        cache.store(ticket, value)
        return value

    return call


def _lasting(function: Callable[..., Any], value: R) -> R:
    """The value, if it can be used more than once. Raises TypeError."""
    if not isinstance(value, Awaitable | Iterator | AsyncIterator):
        return value
    if isinstance(value, Coroutine):
        value.close()
    name = getattr(function, "__qualname__", None) or repr(function)
    remedy = "decorate an async function" if isinstance(value, Awaitable) else "return a list or a tuple"
    raise TypeError(f"{name} returned a {type(value).__name__}, which can be used once and not be kept: {remedy}")


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
        return freeze(tuple(bound.arguments.values()))

    return key_of
