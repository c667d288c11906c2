"""What programs may import: every name is there, costs nothing before it is used, and is described in docs/api.md."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import replicad
from tests import api_page
from tests.source import IN_ONE_PROCESS, ROOT

pytestmark = IN_ONE_PROCESS

HEAVY = ("anyio", "trio", "trio_asyncio", "asyncpg", "pyspark", "pyarrow", "click", "structlog")
PACKAGES = ["replicad", *(face for face in api_page.FACES if (ROOT / face.replace(".", "/")).is_dir())]


def test_the_page_is_what_the_docstrings_say() -> None:
    assert api_page.PAGE.read_text(encoding="utf-8") == api_page.render(), "run `make docs`"


@pytest.mark.parametrize("face", ["replicad", *api_page.FACES])
def test_every_name_on_the_page_can_be_imported_and_says_what_it_is(face: str) -> None:
    module = importlib.import_module(face)
    described = api_page.exported(face)
    origins = {name: getattr(importlib.import_module(one.module.path), one.name) for name, one in described.items()}
    assert [name for name, origin in origins.items() if getattr(module, name) is not origin] == []
    assert [name for name, one in described.items() if one.docstring is None] == []
    assert described


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_exports_what_it_lists_and_nothing_else(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == list(api_page.exported(package))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = module.nonsense


def test_what_the_package_exports_is_described_where_it_comes_from() -> None:
    described = {one.path for face in api_page.FACES for one in api_page.exported(face).values()}
    assert {one.path for one in api_page.exported("replicad").values()} <= described
    assert len(replicad.__all__) > 50


def test_importing_every_package_imports_nothing_heavy() -> None:
    program = f"import sys, {', '.join(PACKAGES)}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_blocking_client_comes_without_trio() -> None:
    program = "import sys; from replicad import BlockingClient, BlockingCacheInvalidator, RowBatch, ReplicadError, Part"
    program += f"; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
