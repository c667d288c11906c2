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
    for path in (ROOT / "README.md", ROOT / "protocol.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*"))
    if path.is_file() and path.suffix in (".md", ".yml", ".yaml", ".toml", ".service", "")
)
INLINE = re.compile(r"`(replicad [a-z][^`\n]*)`")
LINE = re.compile(r"^(?:\$ |ExecStart=\S*/)?(replicad [a-z][^\n]*(?:\\\n[^\n]*)*)", re.MULTILINE)
END = re.compile(r"\s(?:[|<>]|&&|#|\d>)(?:\s|$)|;\s|\s{3,}")  # of the command in a line: a pipe, a comment, a column
NAMES = (
    "replicad positions",
    "replicad bell",
    "replicad deliver",
    "replicad handle",
    "replicad batch",
)  # of sessions and spans


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


# Commands that remove something or stop recording it. The option that makes them do so; "": they do it without one.
HARMFUL = {
    "streams remove": "--yes", "streams skip": "--yes", "streams trim": "", "streams acks": "--forget",
    "streams writers": "--retire", "streams alter": "--table", "tubes drop": "", "tubes detach": "", "tubes purge": "",
    "tubes parked drop": "", "presence disable": "--yes", "caches disable": "", "caches revoke": "",
    "sharding disable": "", "sender parked drop": "", "sender retire": "--yes", "sql down": "|",
}  # fmt: skip
OWN = ("presence", "caches")  # streams of replicad's own: their readers need no old rows
WITHOUT_NAME = ("sender parked drop", "sql down", "presence disable", "caches disable")  # they need no argument


def harm(text: str) -> str | None:
    """The harmful command in a line that works as it is pasted; None if the line does no harm, or has a placeholder."""
    words = re.split(r"\s{3,}|\s#\s", text.removeprefix("replicad "))[0].split()
    for name, option in HARMFUL.items():
        own = name.split()
        if words[: len(own)] != own or not any(word.startswith(option) for word in words):
            continue
        rest = words[len(own) :]
        named = name in WITHOUT_NAME or (bool(rest) and not rest[0].startswith("-") and rest[0] not in OWN)
        if named and rest and not any(re.match(r"\[?[A-Z]{2,}", word) for word in rest):
            return name
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_pasted_line_of_a_page_does_harm(page: Path) -> None:
    assert [text for text in commands(page.read_text()) if harm(text)] == []


def test_a_line_that_does_harm_is_found() -> None:
    assert harm("replicad streams skip events 1204 --yes") == "streams skip"
    assert harm("replicad streams trim events --older-than 7d") == "streams trim"
    assert harm("replicad sql down tube | psql -d app") == "sql down"
    for text in ("skip events 1204", "skip NAME TOKEN --yes", "trim caches --older-than 24h", "list"):
        assert harm(f"replicad streams {text}") is None
    commands_of = {tuple(name.split()) for name in HARMFUL}
    for words in commands_of:
        command: click.Command = root
        for word in words:
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(command), word)
            assert found is not None, words
            command = found


def test_a_command_or_an_option_that_does_not_exist_is_found() -> None:
    assert fault("replicad tubes partitions") == "`replicad tubes` has no command partitions"
    assert fault("replicad streams list --shard 7") == "`replicad streams list` has no option --shard"
    assert fault("replicad streams show NAME --json | jq .") is None
