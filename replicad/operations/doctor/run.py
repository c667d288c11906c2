"""Runs all checks, one after the other, each within a bounded time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import trio

from replicad.errors import ReplicadError
from replicad.operations.doctor.database_checks import DATABASE_CHECKS
from replicad.operations.doctor.declared import Check, Finding, Level, failing, warning
from replicad.operations.doctor.seen import Evidence
from replicad.operations.doctor.sender_checks import SENDER_CHECKS
from replicad.operations.doctor.stream_checks import STREAM_CHECKS
from replicad.operations.doctor.tube_checks import TUBE_CHECKS

LONGEST = 15.0  # seconds for a check; a second look at streams takes three
CHECKS: tuple[Check, ...] = (*DATABASE_CHECKS[:5], *STREAM_CHECKS, *TUBE_CHECKS, *SENDER_CHECKS, *DATABASE_CHECKS[5:])


async def examine(
    seen: Evidence, checks: Sequence[Check] = CHECKS, *, longest: float = LONGEST
) -> AsyncIterator[tuple[Check, Finding]]:
    """The findings of all checks. A check whose `needs` has failed is left out: it would repeat the reason."""
    failed: set[str] = set()
    for check in checks:
        if check.needs in failed:
            failed.add(check.name)
            continue
        found = await _run(check, seen, longest)
        if any(one.level is Level.FAILING for one in found):
            failed.add(check.name)
        for one in found:
            yield check, one


async def _run(check: Check, seen: Evidence, longest: float) -> list[Finding]:
    """A check that cannot be made fails where it can fail, else it warns."""
    report = failing if Level.FAILING in check.levels else warning
    try:
        with trio.fail_after(longest):
            return list(await check.run(seen))
    except trio.TooSlowError:
        return [
            report(f"no answer within {longest:g} s", "see what Postgres waits for: SELECT * FROM pg_stat_activity")
        ]
    except ReplicadError as error:
        return [report(str(error), check.remedy)]
    except Exception as error:  # noqa: BLE001 - a defect in one check hides no finding of another
        return [report(f"the check itself failed: {type(error).__name__}: {error}", "please report it")]
