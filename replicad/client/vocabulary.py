"""The commands that a client understands: the core's, those of streams and of tubes."""

from __future__ import annotations

from replicad.protocol.commands import CORE
from replicad.streams import commands as streams
from replicad.tubes import commands as tubes

VOCABULARY = CORE.with_(*streams.COMMANDS, *tubes.COMMANDS)
