"""docs/dev/specs.md names every rule that a configuration in specs/ switches off, and no other.

docs/positions.md names a test for each assumption about Postgres that a model names at its head. TLC has checked each
configuration as it is now.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/dev/specs.md").read_text(encoding="utf-8")
FILES = sorted((ROOT / "specs").glob("*/without_*.cfg"))


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """specs/run.py."""
    spec = importlib.util.spec_from_file_location("specs_run", ROOT / "specs/run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["specs_run"] = module  # its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def named() -> list[tuple[str, str]]:
    """Model and rule of each row in the tables of rules: they stand under a heading with the model's name."""
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE):
        model = section.split("\n", 1)[0].split(":")[0].strip("` ").removesuffix(".tla")
        found += [(model, rule) for rule in re.findall(r"^\| `without_(\w+)` \|", section, re.MULTILINE)]
    return found


def test_each_rule_of_the_page_has_a_configuration_and_each_configuration_a_row() -> None:
    assert len(FILES) > 40
    assert sorted(named()) == sorted((path.parent.name, path.stem.removeprefix("without_")) for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_configuration_switches_off_the_rule_in_its_name_which_the_model_knows(path: Path) -> None:
    rule = path.stem.removeprefix("without_")
    assert re.findall(r"Off = (.*)", path.read_text(encoding="utf-8")) == [f'{{"{rule}"}}']
    assert f'Rule("{rule}")' in path.parent.with_suffix(".tla").read_text(encoding="utf-8")


def test_every_rule_of_a_model_can_be_switched_off() -> None:
    models = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "specs").glob("*.tla")}
    assert len(models) == 4
    rules = {(model, rule) for model, text in models.items() for rule in re.findall(r'Rule\("(\w+)"\)', text)}
    assert rules == {(path.parent.name, path.stem.removeprefix("without_")) for path in FILES}


ASSUMED = re.compile(r"Assumed of Postgres, .*?:\n(.*?)\.\n", re.DOTALL)
ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| ([^|]*) \| (.*) \|$", re.MULTILINE)
TESTED = re.compile(r"`(tests/[\w/]+\.py)`: `(test_\w+)`")


def test_each_assumption_of_a_model_is_explained_and_has_a_test_that_is_there() -> None:
    section = (ROOT / "docs/positions.md").read_text(encoding="utf-8").split("## Assumptions")[1].split("\n## ")[0]
    rows = {
        name: (set(re.findall(r"\w+", models)), TESTED.findall(tests)) for name, models, tests in ROW.findall(section)
    }
    assert len(rows) > 15
    for path in (ROOT / "specs").glob("*.tla"):
        [names] = ASSUMED.findall(path.read_text(encoding="utf-8"))
        assert set(re.findall(r"\w+", names)) == {name for name, (models, _) in rows.items() if path.stem in models}
    for name, (_, tests) in rows.items():
        assert tests, name
        for file, test in tests:
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), (name, file, test)


def test_each_configuration_was_checked_as_it_is_now(program: ModuleType) -> None:
    stale = [str(run) for run in program.find_runs() if not program.is_checked(run)]
    assert stale == [], "run `make specs`"
    assert set(program.checked()) == {str(run) for run in program.find_runs()}


def test_a_change_of_a_model_or_configuration_makes_its_check_stale(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "specs", tmp_path / "specs")
    monkeypatch.setattr(program, "HERE", tmp_path / "specs")
    runs = program.find_runs()
    for changed, number in (("LockWatch/without_cache_1.cfg", 1), ("LockWatch.tla", 14)):
        before = {run: run.input for run in runs}
        with (tmp_path / "specs" / changed).open("a") as file:
            file.write("\n")
        assert sum(run.input != before[run] for run in runs) == number
        assert {run.model for run in runs if run.input != before[run]} == {"LockWatch"}


def test_only_a_run_that_ended_as_it_had_to_is_kept(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "CHECKED", tmp_path / "checked.json")
    run = program.Run("LockWatch", "without_cache_1")
    found = "3 distinct states found\n"
    violated = "Error: Invariant NoLateRow is violated.\n"
    program.keep(program.judge(run, violated + found, 1.0))
    assert program.is_checked(run)
    assert program.checked()[str(run)]["result"] == "NoLateRow violated"
    for said in (
        "Model checking completed. No error has been found.\n",
        "Error: Invariant NoIdAgain is violated.\n",
        "",
    ):
        program.keep(program.judge(run, said + found, 1.0))
        assert not program.is_checked(run)
