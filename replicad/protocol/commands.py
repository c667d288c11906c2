"""The commands of every connection, in the order of protocol.md.

The commands of streams, tubes and other features are in `commands.py` of their folders. `help_answer` makes the lines
of HELP for all of them.
"""

from __future__ import annotations

import re
from functools import lru_cache

from replicad.config.declaring import nearest
from replicad.protocol.command import Command, Vocabulary, command, declared_in
from replicad.protocol.fields import Kind, json_array_of, text, word
from replicad.protocol.words import MAX_WORD, Side, sendable

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


# HELP: what the commands of a vocabulary are, in lines for a person, and which words a person may have typed.

LONGEST_TYPED = 200  # characters of a line that a person may have typed
UNKNOWN = "unknown_command"  # the code of the ERROR

_DOCSTRING = re.compile(r"[A-Z_]+(?P<ours> \(ours\))?: (?P<text>.+)", re.DOTALL)
_SENTENCE = re.compile(r".+?[.](?=\s|$)", re.DOTALL)
_TYPED = re.compile(r"[A-Za-z0-9_?-]{1,40}")  # no `Host:` of HTTP, no `SSH-2.0-...`


def meaning(kind: type[Command]) -> tuple[str, bool]:
    """The first sentence of what a command is for, and whether it is ours; from the docstring `NAME (ours): ...`."""
    found = _DOCSTRING.fullmatch(kind.__doc__ or "")
    sentence = _SENTENCE.match(found["text"]) if found else None
    said = "" if sentence is None else " ".join(sentence.group().split())
    return said, found is not None and found["ours"] is not None


def help_answer(vocabulary: Vocabulary, word: str) -> bytes:
    """The lines that answer `HELP word`: that command; if there is none, an ERROR and all commands of a client."""
    known = vocabulary.of(Side.CLIENT)
    if word in known:
        return _answer(vocabulary, word)
    if not word:
        return _answer(vocabulary, "")
    near = nearest(word.upper()[:40], known)
    hint = f"did you mean {near}? The commands are" if near is not None else "the commands are"
    error = Error(sendable(f"{UNKNOWN}: there is no command {word[:40]!r}; {hint}:"))
    return f"{error.render()}\n".encode() + _answer(vocabulary, "")


@lru_cache(maxsize=64)
def _answer(vocabulary: Vocabulary, word: str) -> bytes:
    """Rendered once: anybody may ask, as often as he likes."""
    known = vocabulary.of(Side.CLIENT)
    found = [known[word]] if word else known.values()
    lines = [Help(f"{kind.NAME} {kind.USAGE}".rstrip() + f": {_plain(kind)}".rstrip(": ")) for kind in found]
    return "".join(f"{line.render()}\n" for line in [*lines, Help()]).encode()


def _plain(kind: type[Command]) -> str:
    """What the command is for, without the marks of protocol.md that a terminal does not show."""
    return meaning(kind)[0].replace("**", "")


def typed_word(line: str) -> str | None:
    """The first word of a line that a person may have typed. None: a program of another protocol has sent it."""
    word = line.partition(" ")[0]
    if len(line) > LONGEST_TYPED or not line.isprintable() or "HTTP/" in line or not _TYPED.fullmatch(word):
        return None
    return word
