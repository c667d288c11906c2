"""Commands run their async work in one way, by which Ctrl-C cancels it (`run_async`)."""

from __future__ import annotations

import ast

from tests.source import IN_ONE_PROCESS, modules

pytestmark = IN_ONE_PROCESS

# Each runs a loop of its own, and tells of Ctrl-C what a command has to.
WITH_THEIR_OWN_SIGNALS = {
    "replicad.terminal.database",
    "replicad.daemon.daemon",
    "replicad.sender.cli",
    "replicad.cli.demo",
}


def test_every_command_runs_its_async_work_so() -> None:
    found = {
        module.name
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("trio.run", "trio_asyncio.run", "asyncio.run")
    }
    assert found == WITH_THEIR_OWN_SIGNALS
