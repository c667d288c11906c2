"""Other ways to a daemon than TCP, by the scheme of a URL. Which there are is in the list of features."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from replicad.client.sockets import Target
from replicad.errors import EnvironmentRefused, UsageError

if TYPE_CHECKING:
    import trio


def open_target(url: str, target: Target, nursery: trio.Nursery, daemon: str | Sequence[str] | None) -> Target:
    """The target for a URL, from `target`, which has everything but an address. `daemon`: where to ask by TCP.

    Raises:
        UsageError: no feature opens such URLs, or the URL cannot be used.
        EnvironmentRefused: the feature's extra is not installed.
    """
    scheme = url.partition("://")[0]
    # The list is above this room, and names features; only who gives a URL needs it.
    ways = importlib.import_module("replicad.features").schemes()
    if scheme not in ways:
        known = ", ".join(f"{name}://" for name in ways) or "none"
        raise UsageError(f"{scheme[:40]}:// is not a way to a daemon; give a host and a port, or a URL: {known}")
    try:
        module = importlib.import_module(ways[scheme])
    except ModuleNotFoundError as error:
        extra = ways[scheme].split(".")[1]
        raise EnvironmentRefused(f"{scheme}:// needs the extra `{extra}`: pip install 'replicad[{extra}]'") from error
    found: Target = module.open_target(url, target, nursery, daemon)
    return found
