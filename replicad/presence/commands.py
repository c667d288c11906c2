"""The commands by which workers report online users."""

from __future__ import annotations

from replicad.protocol.command import Command, command, declared_in
from replicad.protocol.fields import INTEGER, WORD, choice, json_array_of, text, word, word_or
from replicad.protocol.words import Side


def _with_device(arguments: str) -> str:
    """Senders from before device ids leave the third word out."""
    words = arguments.split(" ")
    return " ".join([*words[:2], "None", *words[2:]]) if len(words) == 4 else arguments


@command("USER_SYNC", Side.CLIENT, verb="presence", speaker="instance_id", earlier=_with_device)
class UserSync(Command):
    """USER_SYNC: a user starts or ends syncing on a device of an instance; the form without device_id is accepted.

    It parses to a device of None, which is `None` on the wire.
    """

    instance_id: str = word("instance_id")
    user_id: str = word("user_id")
    device_id: str | None = word("device_id", word_or("None", WORD))
    syncing: bool = word("start|end", choice(start=True, end=False))
    last_sync_ms: int = word("last_sync_ms", INTEGER)


@command("CLEAR_USER_SYNC", Side.CLIENT, verb="presence", speaker="instance_id")
class ClearUserSync(Command):
    """CLEAR_USER_SYNC: end everything that the instance has reported with USER_SYNC; it is shutting down."""

    instance_id: str = word("instance_id")


@command("USER_IP", Side.CLIENT, verb="presence")
class UserIp(Command):
    """USER_IP: a user was seen at an address. `data` is a JSON array."""

    user_id: str = word("user_id")
    data: str = text("[access_token, ip, user_agent, device_id, last_seen]", json_array_of(5))


COMMANDS = declared_in(__name__)
