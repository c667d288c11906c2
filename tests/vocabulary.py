"""All commands of all features, for tests that say them on the wire. Features beside the core may be missing."""

from replicad import features
from replicad.protocol.command import Command, Vocabulary
from replicad.protocol.commands import *  # noqa: F403
from replicad.protocol.commands import CORE
from replicad.protocol.words import Side
from replicad.streams.commands import *  # noqa: F403
from replicad.tubes.commands import *  # noqa: F403

EVERY = CORE.with_(*(kind for feature in features.served() for kind in feature.commands))
COMMANDS: dict[str, type[Command]] = {kind.NAME: kind for kind in EVERY}
globals().update({kind.__name__: kind for kind in EVERY})


def parse(line: str, sender: Side) -> Command:
    """What a daemon or a client makes of a line."""
    return EVERY.parse(line, sender)


__all__ = ["COMMANDS", "EVERY", "Command", "Side", "Vocabulary", "parse"]
