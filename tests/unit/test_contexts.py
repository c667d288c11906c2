"""Named contexts: where they come from, what goes before what, and that no command works on two places at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from replicad.cli import app
from replicad.config.settings import read_contexts
from replicad.errors import UsageError

GOOD = """
[prod]
database = "postgresql://ops@127.0.0.1:1/prod"
server = "127.0.0.1:2"
[lab]
server = "127.0.0.1:3"
tube_schema = "t"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("REPLICAD_DATABASE", "REPLICAD_SERVER", "REPLICAD_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    made = tmp_path / "replicad/contexts.toml"
    made.parent.mkdir()
    made.write_text(GOOD)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return made


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(
    ("words", "environ", "status", "said"),
    [
        ("streams list --context prod", {}, 4, "replicad: context prod: postgresql://ops@127.0.0.1:1/prod\n"),
        ("--context prod streams list", {}, 4, "no Postgres answers at 127.0.0.1:1"),
        ("streams list", {"REPLICAD_CONTEXT": "prod"}, 4, "no Postgres answers at 127.0.0.1:1"),
        ("tubes list --context prod", {}, 4, "no Postgres answers at 127.0.0.1:1"),
        ("ping --context lab", {}, 4, "no connection to 127.0.0.1:3"),
        # the command line goes before the context, and a context that it names before the environment
        ("ping --context lab --server 127.0.0.1:9", {}, 4, "no connection to 127.0.0.1:9"),
        ("ping --context lab", {"REPLICAD_SERVER": "127.0.0.1:9"}, 4, "no connection to 127.0.0.1:3"),
        ("ping --context lab", {"REPLICAD_CONTEXT": "prod"}, 4, "no connection to 127.0.0.1:3"),
        # nothing else may count beside a context
        ("ping", {"REPLICAD_CONTEXT": "lab", "REPLICAD_SERVER": "127.0.0.1:9"}, 2, "REPLICAD_SERVER is set, and so is"),
        ("ping --context lab", {"REPLICAD_TLS_CA": "x"}, 2, "REPLICAD_TLS_CA is set, and so is the context lab"),
        ("streams list --context lab", {}, 2, "context lab names no database"),
        ("streams list --context lab", {"REPLICAD_DATABASE": "postgresql://x"}, 2, "REPLICAD_DATABASE is set"),
        ("streams list --context prud", {}, 2, "there is no context 'prud' in"),
        ("streams list --context prud", {}, 2, "did you mean prod?"),
        ("--context prod serve", {}, 2, "--context is for commands that administer"),
    ],
)
def test_a_context_says_on_what_a_command_works(
    words: str, environ: dict[str, str], status: int, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert app.run(words.split()) == status
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("server = 'x:1'", "server stands outside of a context; write \\[NAME\\] before it"),
        ("[a b]", "is not TOML"),
        ("['a b']", "'a b' is no name of a context"),
        ("[a]\ndatabse = 'x'", "databse of context a is not known; did you mean database\\?"),
        ("[a]\nserver = 9009", "server of context a: 9009 is not valid; give HOST:PORT"),
        ("[a]\nserver = 'x:y'", "server of context a: 'x:y' is not valid; give HOST:PORT"),
        ("[a]\ntoken = 'x'", "token of context a is not known"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence_that_names_the_place(file: Path, content: str, said: str) -> None:
    file.write_text(content)
    with pytest.raises(UsageError, match=said) as caught:
        read_contexts(file)
    assert str(file) in str(caught.value)


def test_contexts_are_listed_without_passwords_and_a_file_with_one_is_not_for_all(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(GOOD.replace("ops@", "ops:hidden@"))
    file.chmod(0o644)
    assert app.run(["contexts"]) == 2
    assert f"run: chmod o-rwx {file}" in capsys.readouterr().err
    file.chmod(0o600)
    monkeypatch.setenv("REPLICAD_CONTEXT", "lab")
    assert app.run(["contexts"]) == 0
    out = capsys.readouterr().out
    assert "hidden" not in out
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["prod", "no"], ["lab", "yes"]]
    file.unlink()
    assert app.run(["contexts"]) == 0
    assert "there are no contexts" in capsys.readouterr().out


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_a_person_is_told_which_database_a_variable_names(
    terminal: bool, named: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPLICAD_DATABASE", "postgresql://u:hidden@127.0.0.1:1/x")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert app.run(["streams", "list", *(["--database", "postgresql://u@127.0.0.1:2/y"] if named else [])]) == 4
    told = "replicad: REPLICAD_DATABASE: postgresql://u:***@127.0.0.1:1/x\n" in capsys.readouterr().err
    assert told == (terminal and not named)
