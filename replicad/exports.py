"""Names of a package that are imported when they are first used.

A program that needs one name does not import the others: a client on a Spark executor needs no Postgres driver.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def exported(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package; `homes` has the module of each name, below the package."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("replicad."):
                raise
            text = f"{package}.{name} is not part of the package replicad-client: pip install replicad"
            raise ModuleNotFoundError(text, name=error.name) from error

    return find
