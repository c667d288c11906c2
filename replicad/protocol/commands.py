"""The commands of every connection, in the order of protocol.md.

The commands of streams, tubes and other features are in `commands.py` of their folders.
"""

from __future__ import annotations

from replicad.protocol.command import Command, Vocabulary, command, declared_in
from replicad.protocol.fields import Kind, json_array_of, text, word
from replicad.protocol.words import MAX_WORD, Side

__all__ = [
    "CORE", "Auth", "Command", "Error", "Help", "LockReleased", "Name", "Ping", "RemoteServerUp", "Server", "Side",
    "Vocabulary",
]  # fmt: skip


@command("SERVER", Side.SERVER)
class Server(Command):
    """SERVER: the server's name, in the first line of every connection."""

    server_name: str = word("server_name")


@command("PING", Side.BOTH)
class Ping(Command):
    """PING: shows that the sender is alive. The text is its wall-clock time in ms, as in Synapse; nothing uses it."""

    text: str = text("text", empty=True, default="")


@command("NAME", Side.CLIENT)
class Name(Command):
    """NAME: the client's name for logs and lists."""

    text: str = text("text", Kind("name", longest=MAX_WORD))


@command("AUTH", Side.CLIENT)
class Auth(Command):
    """AUTH (ours): the secret of the client, if the daemon asks for one. Only NAME and PING may come before it."""

    token: str = word("token")

    def __repr__(self) -> str:  # a secret must never reach a log
        return "Auth(token=...)"


@command("HELP", Side.BOTH, answer="HELP")
class Help(Command):
    """HELP (ours): the commands that a client may send, or the named one: a HELP for each, an empty one at the end."""

    text: str = text("command", empty=True, default="")


@command("ERROR", Side.BOTH)
class Error(Command):
    """ERROR: `code: sentence` from replicad, any text (or none) from others."""

    text: str = text("text", empty=True)


@command("REMOTE_SERVER_UP", Side.BOTH, verb="relay")
class RemoteServerUp(Command):
    """REMOTE_SERVER_UP: a remote server may be reachable again. Sent on to every other connection of every daemon."""

    server_name: str = word("server_name")


@command("LOCK_RELEASED", Side.BOTH, verb="relay")
class LockReleased(Command):
    """LOCK_RELEASED: a lock is free again. Sent on to every other connection of every daemon."""

    data: str = text("[instance_name, lock_name, lock_key]", json_array_of(3))


CORE = Vocabulary(declared_in(__name__))
