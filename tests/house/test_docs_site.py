"""The site of the docs: every page is in it, what is generated is up to date, and its links lead somewhere."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from replicad.config.declaring import settings_of
from replicad.config.limits import Limits
from replicad.config.settings import ClientSettings, DatabaseSettings, LogSettings, ServerSettings
from replicad.daemon.pools import most_connections
from tests import commands_page

ROOT = Path(__file__).parents[2]
HOOK = runpy.run_path(str(ROOT / "docs/site_hook.py"))


def named(nav: Any) -> Iterator[str]:
    """The pages of a part of the nav."""
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from named(one)


def test_the_nav_names_every_page_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    docs = ROOT / "docs"
    pages = sorted([*(page.relative_to(docs).as_posix() for page in docs.rglob("*.md")), *HOOK["BESIDE"].values()])
    assert sorted(named(config["nav"])) == pages
    assert all((ROOT / source).exists() for source in HOOK["BESIDE"])


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("fastapi", "howto/fastapi.md"),
        ("asyncio", "streams.md"),
        ("pgbouncer", "howto/poolers.md"),
        ("uuid", "tubes.md"),
        ("update", "changes.md"),
        ("delete", "changes.md"),
        ("django", "howto/django.md"),
        ("node", "howto/node.md"),
        ("celery", "howto/celery.md"),
        ("sqlalchemy", "howto/outbox.md"),
        ("nginx", "howto/sse-nginx.md"),
        ("nats jetstream", "nats.md"),
    ],
)
def test_the_search_of_the_site_finds_a_page_that_answers(words: str, page: str) -> None:
    """The site's search matches whole words of the pages (lunr), and the pages of its nav are what it indexes."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").lower()
    assert all(re.search(rf"\b{word}\b", text) for word in words.split())


def test_make_docs_makes_every_generated_page() -> None:
    target = re.search(r"^docs:.*?\n\n", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert target is not None
    made = {name.removeprefix("tests.").replace(".", "/") for name in re.findall(r"tests\.[\w.]+", target[0])}
    tests = ROOT / "tests"
    pages = [page for page in tests.rglob("*page.py") if not page.name.startswith("test_")]
    assert made == {str(page.relative_to(tests).with_suffix("")) for page in pages}


def test_the_page_of_the_commands_is_the_program_with_the_variable_of_every_setting() -> None:
    page = commands_page.render()
    assert commands_page.PAGE.read_text(encoding="utf-8") == page, "run `python -m tests.commands_page`"
    kinds = (ServerSettings, DatabaseSettings, ClientSettings, LogSettings)
    settings = [made for kind in kinds for made in settings_of(kind) if not made.secret]
    assert [made.variable for made in settings if f"`{made.variable}`" not in page] == []
    for line in page.splitlines():
        assert not line.startswith("|") or len(re.findall(r"(?<!\\)\|", line)) == 4, line


def test_links_lead_to_the_pages_of_the_site_and_to_nothing_else() -> None:
    moved, names = HOOK["moved"], {"index.md", "protocol.md", "operating.md", "images/a.png", "examples/a.py"}
    for folder, text, expected in (
        ("", "[x](docs/operating.md#a) and [p](protocol.md)", "[x](operating.md#a) and [p](protocol.md)"),
        ("docs", "[r](../README.md#b), [p](../protocol.md)", "[r](index.md#b), [p](protocol.md)"),
        ("", "[rules](deploy) [e](docs/examples/a.py)", "rules [e](examples/a.py)"),
        (
            "docs/dev",
            "[r](../../README.md#b) [o](../operating.md) [p](gone.md)",
            "[r](../index.md#b) [o](../operating.md) p",
        ),
        ("docs", "[s](#c) [w](https://example.com/a) ![i](images/a.png)", None),
    ):
        assert moved(text, folder, names) == (text if expected is None else expected)


def test_the_page_says_how_many_connections_a_daemon_makes() -> None:
    page, limits = (ROOT / "docs/limits.md").read_text(encoding="utf-8"), Limits()
    numbers = limits.database_connections, limits.catchup_connections, limits.tube_connections
    assert numbers == (8, 4, 4)
    total = most_connections(limits)
    assert f"up to {total} for each daemon: 8 (`--database-connections`), 4 (`--catchup-connections`), 4" in page
    assert f"and {total - sum(numbers)} for its own work" in page


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install --group docs")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site/metrics.html").read_text(encoding="utf-8")
    assert 'src="images/console.png"' in page
    assert (tmp_path / "site/images/console.png").exists()
    assert (tmp_path / "site/search/search_index.json").stat().st_size > 100_000
