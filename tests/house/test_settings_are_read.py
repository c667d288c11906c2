"""Every declared setting is read somewhere: an option that does nothing is worse than none.

What counts is a reading of an attribute of the setting's name in the package. Not counted is what the declaring class
reads in order to check its values (`__post_init__`), and what a class reads of itself: `self.name` in another class is
that class's own attribute.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass

import pytest

from replicad.config.declaring import WHOLE, key_of, setting, settings_of
from tests.source import IN_ONE_PROCESS, modules

pytestmark = IN_ONE_PROCESS

CHECKS = ("__post_init__", "_check_trigger")  # methods that read values in order to refuse them
KINDS = {"setting", "count", "duration", "amount", "choice", "flag"}  # what declares a setting
PLAIN = {"replicad.spark.pipeline_config": "PipelineConfig", "replicad.spark.options": "SourceOptions"}


def declares_settings(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == "replicad.config.declaring"
        and any(name.name in KINDS for name in node.names)
        for node in tree.body
    )


def declared() -> dict[str, set[str]]:
    """Names of settings by the class that declares them."""
    found: dict[str, set[str]] = {}
    for module in modules():
        if not declares_settings(module.tree) and module.name not in PLAIN:
            continue
        for made in vars(importlib.import_module(module.name)).values():
            if not (isinstance(made, type) and is_dataclass(made) and made.__module__ == module.name):
                continue
            names = {entry.name for entry in fields(made)} if made.__name__ == PLAIN.get(module.name) else set()
            names |= {entry.name for entry in fields(made) if key_of(made, entry) is not None}
            if names:
                found[made.__name__] = names
    return found


def readings(trees: Iterable[ast.Module], declaring: Iterable[str]) -> set[str]:
    """Names of all attributes that are read where it counts."""
    found: set[str] = set()
    declaring = set(declaring)

    def visit(node: ast.AST, owner: str | None) -> None:
        if isinstance(node, ast.ClassDef):
            owner = node.name
        elif isinstance(node, ast.FunctionDef) and owner in declaring and node.name in CHECKS:
            return
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            itself = isinstance(node.value, ast.Name) and node.value.id == "self"
            if owner is None or owner in declaring or not itself:
                found.add(node.attr)
        for child in ast.iter_child_nodes(node):
            visit(child, owner)

    for tree in trees:
        visit(tree, None)
    return found


def test_every_setting_is_read_outside_of_its_declaration_and_its_check() -> None:
    classes = declared()
    read = readings((module.tree for module in modules()), classes)
    idle = {f"{owner}.{name}" for owner, names in classes.items() for name in names if name not in read}
    assert idle == set(), "settings that do nothing: remove them, or make them work"


def test_all_settings_are_found_wherever_they_are_declared() -> None:
    classes = declared()
    expected = {"ServerSettings", "DatabaseSettings", "ClientSettings", "LogSettings", "Limits"}
    expected |= {"SenderSettings", "Routing", "Delivery", "SenderBounds", "PipelineConfig", "SourceOptions"}
    assert classes.keys() >= expected
    assert "max_line" in classes["Limits"]
    assert "trigger" in classes["PipelineConfig"]


@dataclass(frozen=True)
class MadeUp:
    """Settings as a module could declare them."""

    size: int = setting(1, "Read by no module.", WHOLE)


@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        ("size = 1", False),
        ("class MadeUp:\n    size = 1\n    def __post_init__(self):\n        assert self.size < 2", False),
        ("class Other:\n    def __init__(self, size):\n        self.size = size\n        print(self.size)", False),
        ("def check(names=('size',)):\n    return [getattr(object, name) for name in names]", False),
        ("settings.size = 2", False),
        ("print(settings.size)", True),
        ("class Other:\n    def __init__(self, settings):\n        self.room = settings.size", True),
        ("class MadeUp:\n    def made(self):\n        return self.size", True),
        ("class Other:\n    def room(self):\n        return self._settings.size", True),
    ],
)
def test_a_setting_that_is_only_declared_checked_or_assigned_does_not_count_as_read(source: str, is_read: bool) -> None:
    names = {made.name for made in settings_of(MadeUp)}
    assert names == {"size"}
    assert (names <= readings([ast.parse(source)], ["MadeUp"])) is is_read
