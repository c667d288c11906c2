"""The commands that a client of the daemon knows: those of every connection, of streams and of tubes."""

from __future__ import annotations

from replicad.protocol.commands import CORE
from replicad.streams import commands as streams
from replicad.tubes import commands as tubes

VOCABULARY = CORE.with_(*streams.COMMANDS, *tubes.COMMANDS)
