"""Connections of the driver that know the array types of Postgres after a connection has asked for them.

asyncpg looks up each type that it has no codec for, and it has none for most arrays: bigint[] and boolean[], say. It
does so on every connection, by a recursive query over the catalog that takes Postgres some 6 ms, and by two more that
switch JIT off and on. But the types of Postgres itself are the same on every server: below `FIRST_ASSIGNED` an oid is
part of the sources of Postgres. So the answer is kept for the whole process.

Knows nothing of trio, and imports no driver: the bridge gives it the driver's class.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

FIRST_ASSIGNED = 10_000  # lower oids are written down in the sources of Postgres (its manual: "OID Assignment")

_found: dict[frozenset[int], Any] = {}  # what the driver found, by the oids: no more than the driver's queries need
_NOT_RUN = SimpleNamespace(name="known")  # instead of the lookup's own statement, of which the driver reads the name


def remembering(driver: type[Any]) -> type[Any]:
    """A class of connections like `driver`, asyncpg's, of which only the first one looks up the types of Postgres.

    It overrides a private method. A version of asyncpg that has no such method, or one with another result, looks up
    types as ever.
    """

    class Remembering(driver):  # type: ignore[misc]
        __slots__ = ()

        async def _introspect_types(self, typeoids: Iterable[int], *rest: Any, **named: Any) -> Any:
            oids = frozenset(typeoids)
            if oids in _found:
                return _found[oids], _NOT_RUN
            result = await super()._introspect_types(oids, *rest, **named)
            if isinstance(result, tuple) and len(result) == 2 and max(oids) < FIRST_ASSIGNED:
                _found[oids] = result[0]
            return result

    return Remembering
