"""The embedded Postgres as a process among processes: shared, taken over, interrupted, killed."""

from __future__ import annotations

import errno
import importlib.util
import os
import pwd
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest

from replicad.cli import app
from replicad.errors import EnvironmentRefused
from replicad.postgres import embedded
from replicad.postgres.embedded import EmbeddedPostgres, embedded_postgres
from replicad.postgres.programs import barrier, usable_programs
from tests.conftest import PATIENCE, psql, server_folder

pytestmark = pytest.mark.postgres
NOBODY = 65534  # an account without rights


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """A folder with a cluster in it that nobody uses; to be copied, which is faster than making one."""
    with server_folder() as folder:
        with EmbeddedPostgres(folder, {"fsync": "off"}):
            pass
        yield folder


@pytest.fixture
def folder(template: Path, postgres_folder: Path) -> Path:
    """A folder of the test's own with a fresh cluster in it."""
    return copied(template, postgres_folder)


def copied(template: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", template / "data", folder / "data"], check=True)
    return folder


# A process that uses the server until a line arrives on its standard input; prints the server's id and URL.
USER = """
import sys
from pathlib import Path
from replicad.postgres.embedded import EmbeddedPostgres
with EmbeddedPostgres(Path(sys.argv[1]), {"fsync": "off"}) as server:
    try:  # before the line that lets the test send a signal
        print(server.pid(), server.url, flush=True)
        sys.stdin.readline()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        print(server.pid(), flush=True)
        sys.stdin.readline()
"""


class User:
    """Another process that uses the server of a folder, in a session of its own as a terminal gives it."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        words = self.line().split()
        self.server, self.url = int(words[0]), words[1]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leave(self) -> None:
        self.process.communicate("go\n", timeout=PATIENCE)
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_data_outlives_a_clean_end_and_no_process_does(postgres_folder: Path) -> None:
    folder = postgres_folder / "with space"
    with embedded_postgres(folder) as url:
        psql(url, "CREATE TABLE kept AS SELECT 1 AS x")
    server = EmbeddedPostgres(folder)
    assert server.pid() is None
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())]
    with server:
        assert psql(server.url, "SELECT x FROM kept") == "1"
        assert psql(server.url, "SHOW fsync") == "on"
        assert psql(server.url, "SHOW max_prepared_transactions") == "64"


def test_no_other_account_can_hold_the_locks(tmp_path: Path) -> None:
    folder = tmp_path / "pg"
    folder.mkdir()
    for name in ("lock", "users"):
        (folder / name).touch(0o644)  # as an earlier one made them
    server = EmbeddedPostgres(folder)
    with server._locked():
        os.close(embedded._open_own(folder / "users"))
        assert [stat.S_IMODE((folder / name).stat().st_mode) for name in ("lock", "users")] == [0o600, 0o600]
    (folder / "lock").unlink()
    (folder / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentRefused, match="lock cannot be opened"), server._locked():
        pass


def test_server_is_stopped_by_the_last_of_those_who_share_it(folder: Path) -> None:
    first, second = User(folder), User(folder)
    assert first.server == second.server
    with EmbeddedPostgres(folder) as third:
        first.leave()
        second.leave()
        assert third.pid() == first.server
        with EmbeddedPostgres(folder):
            pass
        assert third.pid() == first.server
        assert psql(third.url, "SELECT 1") == "1"
    assert third.pid() is None


def test_one_folder_is_one_server_however_it_is_spelled(folder: Path) -> None:
    link = folder.parent / f"{folder.name}-link"
    link.symlink_to(folder)
    spellings = (link, folder / "data" / "..", Path(os.path.relpath(folder)))
    with EmbeddedPostgres(folder, {"fsync": "off"}) as first:
        for other in spellings:
            with EmbeddedPostgres(other, {"fsync": "off"}) as second:
                assert second.pid() == first.pid()
                assert psql(second.url, "SELECT 1") == "1"
        assert first.pid() is not None
    with EmbeddedPostgres(link, {"fsync": "off"}) as first:
        assert first.pid() is not None
    assert EmbeddedPostgres(folder).pid() is None, "stopped by its last user, by another name"


def test_a_server_whose_folder_was_renamed_is_still_known(folder: Path) -> None:
    moved = folder.parent / f"{folder.name}-moved"
    with EmbeddedPostgres(folder, {"fsync": "off"}) as first:
        pid = first.pid()
        folder.rename(moved)
        try:
            assert EmbeddedPostgres(moved).pid() == pid
        finally:
            moved.rename(folder)


def test_server_of_a_killed_process_is_taken_over_and_stopped_in_the_end(folder: Path) -> None:
    killed = User(folder)
    killed.kill()
    with EmbeddedPostgres(folder) as server:
        assert server.pid() == killed.server
        assert psql(server.url, "SELECT 1") == "1"
    assert server.pid() is None


def test_ctrl_c_reaches_the_daemon_and_not_the_server(folder: Path) -> None:
    user = User(folder)
    os.killpg(user.process.pid, signal.SIGINT)
    assert user.line() == "interrupted"
    assert user.line() == str(user.server)
    assert psql(user.url, "SELECT 1") == "1"
    user.leave()
    assert EmbeddedPostgres(folder).pid() is None


def test_many_that_start_at_once_get_one_server(postgres_folder: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", USER, str(postgres_folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    assert len({process.stdout.readline() for process in processes if process.stdout is not None}) == 1
    for process in processes:
        process.communicate("go\n", timeout=PATIENCE)
        assert process.returncode == 0
    assert EmbeddedPostgres(postgres_folder).pid() is None


def test_killed_postmaster_is_started_again_with_its_data(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        psql(server.url, "CREATE TABLE kept AS SELECT 1 AS x")
        pid = server.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.pid() is None)
        server.ensure_running()
        assert server.pid() not in (None, pid)
        assert psql(server.url, "SELECT x FROM kept") == "1"


def test_process_id_that_now_belongs_to_another_program_does_not_count_as_the_server(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        pass
    with subprocess.Popen(["sleep", "100"]) as stranger:
        pidfile = server.data / "postmaster.pid"
        pidfile.write_text(f"{stranger.pid}\n{server.data}\n1\n5432\n{server.data}\n\n  5432001  1\nready   \n")
        (server.data / ".s.PGSQL.5432.lock").write_text(f"{stranger.pid}\n{server.data}\n1\n5432\n")
        assert server.pid() is None
        with server:
            assert psql(server.url, "SELECT 1") == "1"
        assert stranger.poll() is None
        stranger.kill()


def test_initialisation_that_was_killed_half_way_is_done_again(postgres_folder: Path) -> None:
    half = postgres_folder / "data.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(postgres_folder) as server:
        assert psql(server.url, "SELECT 1") == "1"
    assert not half.exists()


def test_long_path_gets_a_socket_elsewhere_that_is_closed_to_others(template: Path, postgres_folder: Path) -> None:
    folder = copied(template, postgres_folder / ("long" * 30))
    with EmbeddedPostgres(folder) as server:
        assert psql(server.url, "SELECT 1") == "1"
        sockets = Path(psql(server.url, "SHOW unix_socket_directories").strip('"'))
        assert not sockets.is_relative_to(folder)
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700


def test_socket_folder_that_somebody_else_prepared_is_refused(
    template: Path, postgres_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.tempfile, "gettempdir", lambda: str(postgres_folder))
    server = EmbeddedPostgres(copied(template, postgres_folder / ("long" * 30)))
    before = set(postgres_folder.iterdir())
    with server:
        pass
    [sockets] = [path for path in set(postgres_folder.iterdir()) - before if path.name.startswith("replicad-")]
    sockets.chmod(0o777)
    with pytest.raises(EnvironmentRefused, match="open to others"):
        server.__enter__()


def error_of_connecting(user: int, path: Path) -> int:
    """The number of the error that an account gets there; 0: it is connected."""
    if (child := os.fork()) == 0:
        os.setgid(user)
        os.setuid(user)
        with socket.socket(socket.AF_UNIX) as link:
            os._exit(link.connect_ex(str(path)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as others")
def test_no_other_account_can_connect_to_the_socket(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        [place] = parse_qs(urlsplit(server.url).query)["host"]
        path = Path(place) / ".s.PGSQL.5432"
        found = path.stat()
        assert stat.S_IMODE(found.st_mode) == 0o700, "also where everybody may pass through its folder"
        assert error_of_connecting(found.st_uid, path) == 0
        assert error_of_connecting(NOBODY, path) == errno.EACCES


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hand things to others")
def test_root_leaves_the_rights_of_folders_as_they_are_and_says_what_is_in_the_way(postgres_folder: Path) -> None:
    home = postgres_folder / "home"
    home.mkdir(mode=0o700)
    wanted = home / "project" / ".replicad" / "postgres"
    with pytest.raises(EnvironmentRefused, match=rf"pass through {home} \(its rights are 0700\): .*chmod o\+x {home}$"):
        EmbeddedPostgres(wanted).__enter__()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    mine = postgres_folder / "mine"  # the folder of the option itself, made by root for itself
    mine.mkdir(mode=0o700)
    with pytest.raises(EnvironmentRefused, match=f"pass through {mine} .*--data-folder"):
        EmbeddedPostgres(mine).__enter__()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hand things to others")
def test_folders_that_root_makes_let_the_server_pass_whatever_the_umask(postgres_folder: Path) -> None:
    before = os.umask(0o077)
    try:
        made = postgres_folder / "a" / "b"
        embedded._make_folder(made)
        assert {stat.S_IMODE(step.stat().st_mode) for step in (made, made.parent)} == {0o701}
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hand things to others")
@pytest.mark.parametrize("closed", ["the programs", "a folder above"])
def test_programs_that_only_root_may_run_are_copied_and_left_alone(postgres_folder: Path, closed: str) -> None:
    account = pwd.getpwnam("nobody")
    programs, shared = postgres_folder / "home" / "package" / "pginstall" / "bin", postgres_folder / "shared"
    programs.mkdir(parents=True)
    (programs / "postgres").touch(mode=0o700 if closed == "the programs" else 0o755)
    (programs.parents[2] / "package.libs").mkdir()
    (programs.parents[2] / "package.libs" / "libpq.so").touch(mode=0o600)
    if closed == "a folder above":
        programs.parents[2].chmod(0o700)
    before = os.umask(0o077)
    try:
        copies = [usable_programs(programs, account, shared) for _ in range(2)]
    finally:
        os.umask(before)
    assert copies[0] == copies[1] != programs
    assert barrier(copies[0], account) is None
    assert stat.S_IMODE((copies[0] / "postgres").stat().st_mode) & 0o005 == 0o005
    [copy] = shared.iterdir()  # nothing is left of making it
    assert stat.S_IMODE((copy / "package.libs" / "libpq.so").stat().st_mode) == 0o604
    assert stat.S_IMODE(programs.parents[2].stat().st_mode) == (0o700 if closed == "a folder above" else 0o755)
    shared.chmod(0o777)
    with pytest.raises(EnvironmentRefused, match="others may write in it"):
        usable_programs(programs, account, shared)


def test_data_of_another_major_version_is_refused_with_both_remedies(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        pass
    (server.data / "PG_VERSION").write_text("12\n")
    with pytest.raises(EnvironmentRefused, match=r"made by PostgreSQL 12 .* embedded-postgres==12\.\*"):
        server.__enter__()


def test_folder_with_something_else_in_it_is_left_alone(postgres_folder: Path) -> None:
    (postgres_folder / "data").mkdir()
    (postgres_folder / "data" / "thesis.txt").write_text("do not touch")
    with pytest.raises(EnvironmentRefused, match="is no Postgres cluster"):
        EmbeddedPostgres(postgres_folder).__enter__()
    assert (postgres_folder / "data" / "thesis.txt").exists()


def test_setting_that_does_not_exist_is_told_with_the_servers_own_words(folder: Path) -> None:
    with pytest.raises(EnvironmentRefused, match="no_such_setting"):
        EmbeddedPostgres(folder, {"no_such_setting": "1"}).__enter__()


def test_a_server_that_crashes_again_and_again_is_told_with_what_it_crashes_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = EmbeddedPostgres._run

    def crash(self: EmbeddedPostgres, name: str, *words: str, timeout: float) -> int:
        if name != "pg_isready":
            return run(self, name, *words, timeout=timeout)
        with (self.data / "server.log").open("a") as log:
            log.write("1 UTC [7] PANIC:  could not write to file: No space left on device\n")
            log.write("1 UTC [8] LOG:  all server processes terminated; reinitializing\n")
            log.write("1 UTC [9] FATAL:  the database system is in recovery mode\n")
        return 1

    with EmbeddedPostgres(folder) as server, monkeypatch.context() as patch:
        patch.setattr(EmbeddedPostgres, "_run", crash)
        begun = time.monotonic()
        with pytest.raises(EnvironmentRefused, match=r"failed \(start\): .*No space left on device$"):
            server.ensure_running()
        assert time.monotonic() - begun < embedded._START / 2  # it does not wait for a recovery that cannot come


def test_a_server_that_waits_for_ever_while_it_recovers_is_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PostgreSQL 18 does where a process that recovery waits for died on a full disk."""
    run, hangs = EmbeddedPostgres._run, [True]

    def hang(self: EmbeddedPostgres, name: str, *words: str, timeout: float) -> int:
        if name == "pg_ctl" and words[-1] == "stop":
            hangs.clear()
        return 1 if hangs and name == "pg_isready" else run(self, name, *words, timeout=timeout)

    with EmbeddedPostgres(folder) as server, monkeypatch.context() as patch:
        patch.setattr(EmbeddedPostgres, "_run", hang)
        patch.setattr(embedded, "_STUCK", 1.0)
        before = server.pid()
        server.ensure_running()
        assert server.pid() not in (before, None)
        assert psql(server.url, "SELECT 1") == "1"


def test_missing_package_is_told_with_the_command_that_installs_it(
    postgres_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentRefused, match=r"pip install 'replicad\[embedded\]'"):
        EmbeddedPostgres(postgres_folder).__enter__()


def test_large_log_is_put_aside_at_the_next_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedPostgres(folder) as server:
        pass
    monkeypatch.setattr(embedded, "_LOG_MAX", 1)
    with server:
        pass
    assert (server.data / "server.log.old").exists()


@pytest.mark.parametrize(
    "odd", ["a file", "a file in the way", "no cluster", "no version", "a link to itself", "too long"]
)
def test_an_odd_folder_for_the_embedded_postgres_is_a_sentence(
    odd: str, postgres_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REPLICAD_DATABASE", raising=False)
    folder = postgres_folder / "odd"
    match odd:
        case "a file":
            folder.write_text("")
        case "a file in the way":
            folder.write_text("")
            folder = folder / "below"
        case "no cluster":
            (folder / "data").mkdir(parents=True)
        case "no version":
            (folder / "data").mkdir(parents=True)
            (folder / "data/PG_VERSION").write_text("")
        case "a link to itself":
            folder.symlink_to(folder)
        case "too long":
            folder = postgres_folder / ("x" * 300)
    for words in (["serve", "--listen", "127.0.0.1:0"], ["streams", "list"]):
        assert app.run([*words, "--data-folder", str(folder)]) == 3, capfd.readouterr().err
        said = capfd.readouterr().err.splitlines()[-1]
        assert said.startswith("replicad: "), said
        assert "unexpected" not in said


def test_a_disk_so_full_that_no_program_can_say_why_is_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedPostgres, "_run", lambda *_, **__: 0)  # nothing reaches tools.log
    monkeypatch.setattr(embedded, "_is_full", lambda _: True)
    with pytest.raises(EnvironmentRefused, match=r"The disk is full: free some room"), EmbeddedPostgres(folder):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_daemon_that_is_interrupted_while_its_server_starts_leaves_none(folder: Path, number: int) -> None:
    command = [sys.executable, "-m", "replicad", "serve", "--data-folder", str(folder), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as daemon:
        deadline = time.monotonic() + PATIENCE
        while not (folder / "data" / "postmaster.pid").exists():  # pg_ctl waits from here until the server answers
            assert time.monotonic() < deadline
            time.sleep(0.002)
        daemon.send_signal(number)
        assert daemon.wait(PATIENCE) == 130, daemon.stderr and daemon.stderr.read()
    left = [
        process for process in psutil.process_iter(["cmdline"]) if f"{folder}/data" in (process.info["cmdline"] or ())
    ]
    assert left == []
