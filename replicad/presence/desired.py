"""Presence in a file for `replicad apply`: enabled, with these settings."""

from __future__ import annotations

from replicad.config.declaring import SECONDS
from replicad.presence.repository import PresenceRepository
from replicad.terminal.desired.section import Section, SectionKey, TargetDatabase, Values, as_it_stands

_DAY = 86_400
_KEYS = ("grace", "lost_grace", "ttl", "ip_retention")


async def present(place: TargetDatabase) -> dict[str, Values]:
    """The settings, if presence is enabled."""
    look = await PresenceRepository(place.db, place.settings.stream_schema).look()
    return {} if look is None else {"": {key: getattr(look, key) for key in _KEYS}}


async def change(place: TargetDatabase, name: str, before: Values | None, wanted: Values) -> None:  # noqa: ARG001
    """Enable presence with these settings; install what it needs."""
    await PresenceRepository(place.db, place.settings.stream_schema).enable(**{key: wanted[key] for key in _KEYS})


SECTION = Section(
    name="presence",
    one="presence",
    keys=(  # the defaults are those of presence_setting in presence/sql/presence.sql
        SectionKey("grace", SECONDS, 30.0, minimum=0, maximum=_DAY),
        SectionKey("lost_grace", SECONDS, 30.0, minimum=0, maximum=_DAY),
        SectionKey("ttl", SECONDS, 15.0, minimum=0.3, maximum=3600),
        SectionKey("ip_retention", SECONDS, 28.0 * _DAY, minimum=1, maximum=3660 * _DAY),
    ),
    present=present,
    normal=as_it_stands,
    change=change,
    removal=lambda _: "to disable it: replicad presence disable",
    named=False,
)
