"""The streams whose writers share the keys, in a file for `replicad apply`."""

from __future__ import annotations

from replicad.config.declaring import WHOLE
from replicad.sharding import admin
from replicad.terminal.desired.section import Section, SectionKey, TargetDatabase, Values, as_it_stands

_MOST_SLOTS = 4096


async def present(place: TargetDatabase) -> dict[str, Values]:
    """The streams whose keys are shared."""
    found = await admin.list_shared(place.db, schema=place.settings.stream_schema)
    return {one.stream: {"slots": one.slots} for one in found}


async def change(place: TargetDatabase, name: str, before: Values | None, wanted: Values) -> None:  # noqa: ARG001
    """Let the writers share the keys; install the SQL that this needs."""
    await admin.enable(place.db, name, wanted["slots"], schema=place.settings.stream_schema)


SECTION = Section(
    name="sharding",
    one="sharding of stream",
    keys=(
        SectionKey(
            "slots",
            WHOLE,
            admin.SLOTS,
            minimum=1,
            maximum=_MOST_SLOTS,
            fixed="a key's slot depends on the number: stop the writers, replicad sharding disable NAME, then apply",
        ),
    ),
    present=present,
    normal=as_it_stands,
    change=change,
    needs="streams",
    removal=lambda name: f"to end it: replicad sharding disable {name}",
)
