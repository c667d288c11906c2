"""Presence in a file for `replicad apply`: enabled, with these settings."""

from __future__ import annotations

from replicad.presence.repository import PresenceRepository
from replicad.terminal.desired.section import Section, SectionKey, TargetDatabase, Values, as_it_stands, duration

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
    keys=(  # the defaults are those of presence/sql/011_presence_setting.sql
        SectionKey("grace", duration(0, _DAY), 30.0),
        SectionKey("lost_grace", duration(0, _DAY), 30.0),
        SectionKey("ttl", duration(0.3, 3600), 15.0),
        SectionKey("ip_retention", duration(1, 3660 * _DAY), 28.0 * _DAY),
    ),
    present=present,
    normal=as_it_stands,
    change=change,
    removal=lambda _: "to disable it: replicad presence disable",
    named=False,
)
