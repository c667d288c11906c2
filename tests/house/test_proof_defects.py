"""The defects that are put back (tests/proof/defects) keep up with the code, and name tests that exist."""

from __future__ import annotations

import pytest

from tests.house.test_proof import functions
from tests.proof.catalogue import ROOT, Command
from tests.proof.defects import Defect, apply, defects


@pytest.mark.parametrize("defect", defects(), ids=lambda one: one.name)
def test_a_defect_can_be_put_back_and_names_the_tests_that_find_it(defect: Defect) -> None:
    assert apply(defect, ROOT, check=True) == "", f"write {defect.path.name} anew for the code as it is now"
    assert defect.what.endswith(".")
    assert defect.found_by
    for command in defect.found_by:
        if command.node is not None:
            file, _, name = command.node.partition("::")
            assert name.partition("[")[0] in functions(ROOT / file), f"{file} has no {name}; which test finds it now?"


def test_there_are_fifteen_of_them() -> None:
    assert len(defects()) >= 15


def test_a_patch_that_does_not_apply_is_noticed(tmp_path: object) -> None:
    from dataclasses import replace
    from pathlib import Path

    one = defects()[0]
    old = Path(str(tmp_path)) / "old.patch"
    old.write_text(one.path.read_text(encoding="utf-8").replace("\n ", "\n not in the code "), encoding="utf-8")
    assert apply(replace(one, path=old), ROOT, check=True) != ""
    assert Command("a.py::test_b").words == ["pytest", "tests/a.py::test_b"]
