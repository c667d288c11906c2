"""Every way in passes the same admission: only `Acceptor` accepts connections, and those that it serves are counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.source import IN_ONE_PROCESS, PACKAGE, modules

pytestmark = IN_ONE_PROCESS

LISTENING = {
    "create_server",
    "open_tcp_listeners",
    "open_unix_listeners",
    "serve_tcp",
    "serve_listeners",
    "start_server",
}
WAYS_IN = {"daemon/daemon.py": "admit", "operations/http/server.py": "admitted"}  # and what counts a connection there


def calls() -> Iterator[tuple[str, str]]:
    """Each file, and the names that are called in it."""
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.Call):
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                yield module.path.relative_to(PACKAGE).as_posix(), name


def test_connections_are_accepted_in_one_place_and_counted_wherever_they_are_served() -> None:
    found = set(calls())
    assert {file for file, name in found if name in LISTENING} == {"daemon/admission.py"}
    assert {file for file, name in found if name == "Acceptor"} == WAYS_IN.keys()
    for file, counts in WAYS_IN.items():
        assert (file, counts) in found
