"""The catalogue of faults, the tests that it names and docs/faults.md agree."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tests.proof import page
from tests.proof.catalogue import (
    FAULTS,
    PARTS,
    ROOT,
    Command,
    command_of,
    every_command,
    everyday,
    faults,
    results,
)


@cache
def functions(file: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The tests of a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_")}


def long_marks(file: Path, name: str) -> tuple[bool, bool]:
    """Whether this test, or some form of it, is marked as long; and whether all of it is."""
    marks = [ast.unparse(one) for one in functions(file)[name].decorator_list]
    statement = r"^pytestmark\b(?:(?!\n\n).)*?mark\.long\b"
    marked = re.search(statement, file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    whole = marked is not None or "pytest.mark.long" in marks
    return whole or any("long" in mark or "first(" in mark for mark in marks), whole


def test_the_list_has_every_fault_once_and_each_says_what_holds_and_what_is_seen() -> None:
    assert [fault.name for fault in faults()] == [str(number) for number in range(1, FAULTS + 1)]
    assert len({fault.name for fault in everyday()}) == len(everyday()) >= 35
    for fault in faults():
        assert min(len(fault.fault), len(fault.promise)) > 10, fault.name
        assert fault.promise.endswith("."), fault.name
        assert fault.seen, fault.name
        assert not fault.seen.endswith("."), fault.name


def test_each_fault_has_commands_for_each_part_that_it_concerns_and_for_no_other() -> None:
    for fault in (*faults(), *everyday()):
        tried = {part for parts, commands in fault.runs for part in parts if commands}
        assert set(fault.concerns) <= tried, f"fault {fault.name}: no command for {set(fault.concerns) - tried}"
        assert tried <= set(fault.concerns), f"fault {fault.name} concerns {tried - set(fault.concerns)} too"
        assert set(fault.concerns) <= set(PARTS), fault.name


def test_each_test_of_the_catalogue_exists() -> None:
    advice = "name the test that tries this now in tests/proof/faults.toml"
    for command in every_command():
        if command.node is None:
            continue
        file, _, name = command.node.partition("::")
        path, name = ROOT / file, name.partition("[")[0]
        assert path.is_file(), f"{file} is gone; {advice}"
        assert name in functions(path), f"{file} has no {name}; {advice}"
        some, whole = long_marks(path, name)
        assert some or not command.long, f"{command.text}: it is in the suite: leave out `long:`"
        assert command.long or not whole, f"{command.text}: it is long: write `long: {command.text}`"


def test_each_schedule_of_the_catalogue_is_a_command_that_its_program_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import torture, tubes_torture

    for command in every_command():
        if command.node is not None:
            continue
        module, *words = command.words
        program = {"tests.torture": torture, "tests.tubes_torture": tubes_torture}[module]
        played: list[object] = []
        if program is torture:
            monkeypatch.setattr(torture, "torture", lambda *args, played=played, **named: played.append(args) or [])
            monkeypatch.setattr(torture.structlog, "configure", lambda **_: None)
        else:
            monkeypatch.setattr(tubes_torture, "play", lambda *args, played=played: played.append(args) or [])
        monkeypatch.setattr("sys.argv", [module, *words])
        with suppress(SystemExit):
            program.main()
        assert len(played) == 1, command.line


def test_the_page_is_made_from_the_catalogue_and_the_last_results() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.render(results()), "run `python -m tests.proof.page`"


def test_a_failed_command_is_shown_as_failed_with_its_command() -> None:
    command = faults()[0].runs[0][1][0]
    run = {"outcome": "failed", "seconds": 1.0, "date": "2026-01-01 00:00 UTC", "why": "a row | is lost"}
    text = page.render({"about": {}, "runs": {command.text: run}, "defects": {}})
    assert f"- `{command.line}`: **failed**, 2026-01-01 00:00 UTC, 1.0 s: a row \\| is lost" in text
    assert f"`{command.line}` | **failed**" in text


def test_what_was_run_is_found_by_its_id_in_every_form() -> None:
    wanted = {f"tests/{name}": Command(name) for name in ("a.py::test_x", "a.py::test_y[one]")}
    for nodeid, text in (
        ("tests/a.py::test_x", "a.py::test_x"),
        ("tests/a.py::test_x[1-2]@spark", "a.py::test_x"),
        ("tests/a.py::test_y[one]@everyday", "a.py::test_y[one]"),
        ("tests/a.py::test_y[two]@everyday", None),
        ("tests/a.py::test_xy", None),
    ):
        found = command_of(nodeid, wanted)
        assert (found and found.text) == text


def test_a_command_that_selects_no_test_or_is_skipped_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests.proof import __main__ as runner
    from tests.proof import catalogue

    (tmp_path / "test_z.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): raise ValueError('lost')\n"
        "@pytest.mark.skip(reason='no disk')\ndef test_skipped(): pass\n"
        "@pytest.fixture\ndef broken(): raise RuntimeError('no server')\ndef test_errs(broken): pass\n"
    )
    monkeypatch.setattr(Command, "node", property(lambda self: self.text))
    monkeypatch.setattr(catalogue, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "faults.md")
    monkeypatch.setattr(runner, "keep", lambda found: (tmp_path / "results.json").write_text(json.dumps(found)))
    monkeypatch.setattr(runner, "about", lambda source: {})
    commands = [Command(f"test_z.py::test_{name}") for name in ("good", "bad", "skipped", "errs")]
    run = runner.Run(commands, 200, "0", root=tmp_path)
    run.play()
    found = {name.rpartition("_")[2]: (one["outcome"], one.get("why", "")) for name, one in run.found["runs"].items()}
    assert found["good"] == ("passed", "")
    assert (found["bad"][0], "lost" in found["bad"][1]) == ("failed", True)
    assert (found["skipped"][0], "no disk" in found["skipped"][1]) == ("skipped", True)
    assert (found["errs"][0], "no server" in found["errs"][1]) == ("failed", True)
    gone = runner.Run([Command("test_z.py::test_good"), Command("test_z.py::test_gone")], 200, "0", root=tmp_path)
    gone.play()
    assert gone.found["runs"]["test_z.py::test_gone"]["outcome"] == "failed"
