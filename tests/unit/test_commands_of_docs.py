"""Each command that a page names exists, with the options that the page gives it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from replicad.cli.app import root

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in (ROOT / "README.md", ROOT / "protocol.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*"))
    if path.is_file() and path.suffix in (".md", ".yml", ".yaml", ".toml", ".service", "")
)
INLINE = re.compile(r"`(replicad [a-z][^`\n]*)`")
LINE = re.compile(r"^(?:\$ |ExecStart=\S*/)?(replicad [a-z][^\n]*(?:\\\n[^\n]*)*)", re.MULTILINE)
END = re.compile(r"\s(?:[|<>]|&&|#|\d>)(?:\s|$)|;\s|\s{3,}")  # of the command in a line: a pipe, a comment, a column
NAMES = ("replicad positions", "replicad bell")  # values of application_name, not commands


def commands(text: str) -> Iterator[str]:
    for fenced in re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL):
        for found in LINE.findall(fenced):
            yield found.replace("\\\n", " ")
    inline = INLINE.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    yield from (found for found in inline if found not in NAMES)


def fault(text: str) -> str | None:
    """Why the command line cannot be parsed; None if it can. Pages may leave arguments out."""
    if end := END.search(text):
        text = text[: end.start()]
    try:
        words = shlex.split(text)[1:]
    except ValueError:
        return None  # a quotation that goes on in the next line
    command: click.Command = root
    path = "replicad"
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words[0]
        if name.isupper() or not re.fullmatch(r"[a-z][a-z-]*", name):
            return None  # a placeholder
        inner = command.get_command(click.Context(command), name)
        if inner is None:
            return f"`{path}` has no command {name}"
        command, path, words = inner, f"{path} {name}", words[1:]
    if command.context_settings.get("ignore_unknown_options"):
        return None  # of a program that it starts
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {
        "--help",
        "-h",
        "--version",
    }
    for word in words:
        name = word.partition("=")[0]
        if name == "--":
            return None
        if re.fullmatch(r"--?[a-z][a-z0-9-]*", name) and name not in known:
            return f"`{path}` has no option {name}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_command_of_a_page_exists(page: Path) -> None:
    faults = {f"{text}: {why}" for text in commands(page.read_text()) if (why := fault(text)) is not None}
    assert not faults


def test_a_command_or_an_option_that_does_not_exist_is_found() -> None:
    assert fault("replicad tubes partitions") == "`replicad tubes` has no command partitions"
    assert fault("replicad streams list --shard 7") == "`replicad streams list` has no option --shard"
    assert fault("replicad streams show NAME --json | jq .") is None
