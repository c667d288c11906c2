"""The commands of every connection, whatever it is used for, in the order of the protocol's page.

What streams, tubes and other features say stands in `commands.py` of their folders.
"""

from __future__ import annotations

from replicad.protocol.command import Command, Vocabulary, command, declared_in
from replicad.protocol.fields import Kind, json_array_of, text, word
from replicad.protocol.words import MAX_WORD, Side

__all__ = [
    "CORE", "Auth", "Command", "Error", "LockReleased", "Name", "Ping", "RemoteServerUp", "Server", "Side",
    "Vocabulary",
]  # fmt: skip


@command("SERVER", Side.SERVER)
class Server(Command):
    """SERVER: the server's name; the first line of every connection."""

    server_name: str = word("server_name")


@command("PING", Side.BOTH)
class Ping(Command):
    """PING: the sender is alive. The text is the sender's wall-clock time in ms, as in Synapse; nothing uses it."""

    text: str = text("text", empty=True, default="")


@command("NAME", Side.CLIENT)
class Name(Command):
    """NAME: what the client wants to be called in logs and lists."""

    text: str = text("text", Kind("name", longest=MAX_WORD))


@command("AUTH", Side.CLIENT)
class Auth(Command):
    """AUTH (ours): the shared secret, where the daemon asks for one; only NAME and PING may come before it."""

    token: str = word("token")

    def __repr__(self) -> str:  # a secret must never reach a log
        return "Auth(token=...)"


@command("ERROR", Side.BOTH)
class Error(Command):
    """ERROR: `code: sentence` from replicad, free text from others. The text may be anything, even nothing."""

    text: str = text("text", empty=True)


@command("REMOTE_SERVER_UP", Side.BOTH, verb="relay")
class RemoteServerUp(Command):
    """REMOTE_SERVER_UP: a remote server may be back; passed on to every other connection of every daemon."""

    server_name: str = word("server_name")


@command("LOCK_RELEASED", Side.BOTH, verb="relay")
class LockReleased(Command):
    """LOCK_RELEASED: a lock is free again; passed on to every other connection of every daemon. `data` is JSON."""

    data: str = text("[instance_name, lock_name, lock_key]", json_array_of(3))


CORE = Vocabulary(declared_in(__name__))
