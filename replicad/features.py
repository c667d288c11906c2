"""The features of this program. Without its lines here and its folder a feature is not there.

A line names modules, which are imported when they are needed: `serves` has what the daemon needs of the feature as
FEATURE, a module in `commands` has a group of the command line as `command`, and one in `desired` has as SECTION what a
file for `replicad apply` may say of the feature. `schemes` are schemes of URLs for `open_client`; their module has
`open_target`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicad.daemon.service import Feature
    from replicad.terminal.desired import Section


@dataclass(frozen=True, slots=True)
class Listed:
    """A feature on the list."""

    serves: str | None = None
    desired: Sequence[str] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    schemes: Mapping[str, str] = field(default_factory=dict)


FEATURES = (
    Listed(serves="replicad.streams.serving.service", commands={"streams": "replicad.streams.cli"}),
    Listed(serves="replicad.tubes.serving.service", commands={"tubes": "replicad.tubes.cli.tubes"}),
    Listed(desired=("replicad.streams.desired", "replicad.tubes.cli.desired")),
    Listed(commands={"tail": "replicad.client.cli.tail", "ping": "replicad.client.cli.ping"}),
    Listed(serves="replicad.presence.service", commands={"presence": "replicad.presence.cli"}),
    Listed(desired=("replicad.presence.repository",)),
    Listed(desired=("replicad.caches.desired",), commands={"caches": "replicad.caches.cli"}),
    Listed(desired=("replicad.sharding.admin",), commands={"sharding": "replicad.sharding.cli"}),
    Listed(serves="replicad.redis.service"),
    Listed(schemes={"redis": "replicad.redis.following", "rediss": "replicad.redis.following"}),
    Listed(commands={"nats": "replicad.nats.cli"}),
    Listed(serves="replicad.sender.serving", commands={"sender": "replicad.sender.cli"}),
    Listed(commands={"pipeline": "replicad.spark.cli"}),
    Listed(serves="replicad.operations.serving", commands={"top": "replicad.operations.top"}),
    Listed(commands={"status": "replicad.operations.top:status", "clients": "replicad.operations.clients"}),
    Listed(commands={"conform": "replicad.conform.cli"}),
    Listed(commands={"doctor": "replicad.operations.doctor.cli", "psql": "replicad.operations.psql"}),
)


def served() -> list[Feature]:
    """The features that a daemon serves."""
    return [importlib.import_module(listed.serves).FEATURE for listed in FEATURES if listed.serves is not None]


def sections() -> list[Section]:
    """What a file for `replicad apply` may have, in the order in which it is made."""
    return [importlib.import_module(name).SECTION for listed in FEATURES for name in listed.desired]


def schemes() -> dict[str, str]:
    """The module for each scheme of a URL with which a client can be opened."""
    return {name: module for listed in FEATURES for name, module in listed.schemes.items()}


def command_modules() -> dict[str, str]:
    """The module of each command that the features have."""
    return {name: module for listed in FEATURES for name, module in listed.commands.items()}
