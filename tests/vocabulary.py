"""All commands of all features, for tests that say them on the wire."""

from replicad.presence.commands import *  # noqa: F403
from replicad.presence.commands import COMMANDS as PRESENCE
from replicad.protocol.command import Command, Vocabulary
from replicad.protocol.commands import *  # noqa: F403
from replicad.protocol.commands import CORE
from replicad.protocol.words import Side
from replicad.streams.commands import *  # noqa: F403
from replicad.streams.commands import COMMANDS as STREAMS
from replicad.tubes.commands import *  # noqa: F403
from replicad.tubes.commands import COMMANDS as TUBES

EVERY = CORE.with_(*STREAMS, *TUBES, *PRESENCE)
COMMANDS: dict[str, type[Command]] = {kind.NAME: kind for kind in EVERY}


def parse(line: str, sender: Side) -> Command:
    """What a daemon or a client makes of a line."""
    return EVERY.parse(line, sender)


__all__ = ["COMMANDS", "EVERY", "Command", "Side", "Vocabulary", "parse"]
