"""The daemon begins with the allocator of the C library, unless somebody has chosen one. Other commands do not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from replicad.cli import allocator
from replicad.cli.allocator import VARIABLE, choose_allocator

SCRIPT = """
import os, sys
sys.stdout.write(os.environ.get("PYTHONMALLOC", "-") + " " + str(os.getpid()) + " " + " ".join(sys.argv[1:]) + "\\n")
sys.stdout.flush()
from replicad.cli.allocator import choose_allocator
choose_allocator(sys.argv[0], sys.argv[1:])
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines with which Python is started again."""
    found: list[list[str]] = []
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(allocator, "is_suitable", lambda: True)
    monkeypatch.setattr(os, "execv", lambda _program, words: found.append(words))
    return found


def test_only_the_daemon_is_started_again(started: list[list[str]]) -> None:
    choose_allocator(__file__, ["streams", "list"])
    assert started == []
    choose_allocator(__file__, ["--context", "c", "serve", "--listen", "127.0.0.1:0"])
    assert started == [[sys.executable, *sys.orig_argv[1:]]]
    assert os.environ.pop(VARIABLE) == "malloc"


def test_where_no_program_may_be_started_it_serves_with_what_it_has(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_program: str, _words: list[str]) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "execv", refuse)
    choose_allocator(__file__, ["serve"])
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("chosen", ["malloc", "pymalloc", "debug"])
def test_a_choice_of_the_user_counts(chosen: str, started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, chosen)
    choose_allocator(__file__, ["serve"])
    assert started == []
    assert os.environ[VARIABLE] == chosen


@pytest.mark.parametrize("program", ["", "-", "/dev/stdin", "/dev/null"])
def test_a_program_that_was_read_from_a_pipe_is_not_started_again(program: str, started: list[list[str]]) -> None:
    choose_allocator(program, ["serve"])
    assert started == []


@pytest.mark.parametrize(
    ("version", "suitable"),
    [("glibc 2.36", True), ("glibc 2.33.1", True), ("glibc 2.31", False), ("glibc next", False), ("musl 2.40", False)],
)
def test_it_needs_a_glibc_that_is_new_enough(version: str, suitable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", lambda _name: version)
    monkeypatch.setattr(os, "confstr_names", {"CS_GNU_LIBC_VERSION": 2})
    assert allocator.is_suitable() is suitable
    monkeypatch.setattr(os, "confstr_names", {})
    assert not allocator.is_suitable()


@pytest.mark.skipif(not allocator.is_suitable(), reason="needs glibc 2.33 or newer")
def test_it_is_the_same_process_with_the_same_arguments_once_more() -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    words = [sys.executable, "-c", SCRIPT, "serve", "--listen", "a b"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60)
    first, second = done.stdout.splitlines()
    assert first.startswith("- ")
    assert second == f"malloc{first[1:]}"
