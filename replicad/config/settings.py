"""What can be set, with its default and the reason for it: frozen dataclasses, validated when they are made.

The only reader of the environment (`REPLICAD_*`) and of files (configuration, token, certificates). Who uses a value
and how is none of its business; how a value is found and checked stands in `settings`, the bounds stand in `limits`.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from replicad.config.declaring import choice, load, path, read_file, setting, text_of
from replicad.config.limits import Limits
from replicad.config.secrets import read_token, trust, word
from replicad.errors import UsageError
from replicad.masking import mask_secrets

T = TypeVar("T")

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9009

_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252})")
_SCHEMA = text_of(r"[^\0]{1,63}", "give the name of a schema, at most 63 characters")  # Postgres cuts longer names off


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen or to connect to. Port 0 asks the system for a free one (listening only)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read `HOST:PORT`, an IPv6 address in brackets: `127.0.0.1:9009`, `db1.example.org:9009`, `[::1]:9009`.

    Raises:
        ValueError: not of that form; the message says what is.
    """
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?)\]:([0-9]{1,5})", text)
    host, _, port = text.rpartition(":")
    if bracketed:
        host, port = bracketed.groups()
        try:
            socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        except OSError:
            raise ValueError(f"{host} is not an IPv6 address") from None
    elif not re.fullmatch(r"[0-9]{1,5}", port) or not _HOST.fullmatch(host):
        raise ValueError("give HOST:PORT such as 127.0.0.1:9009, localhost:9009 or [::1]:9009")
    if int(port) > 65535:
        raise ValueError(f"a port is at most 65535, not {port}")
    return Address(host, int(port))


def _database(text: str) -> str:
    if not re.match(r"postgres(ql)?://", text):
        raise ValueError("give a URL such as postgresql://user@host:5432/name")
    return text


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """Which Postgres, and where our schemas are in it."""

    database: str | None = setting(
        None,
        "Postgres to use, PostgreSQL 15 or newer. Without it replicad runs one of its own (the extra `embedded`).",
        "URL",
        _database,
        in_repr=False,
    )
    data_folder: Path = setting(
        Path(".replicad/postgres"), "Where the embedded Postgres keeps its data.", "FOLDER", path
    )
    tube_schema: str = setting("tube", "Schema that holds the tubes and their functions.", "SCHEMA", _SCHEMA)
    stream_schema: str = setting("replicad", "Schema that holds the registry of streams.", "SCHEMA", _SCHEMA)

    def __post_init__(self) -> None:
        if self.tube_schema == self.stream_schema:
            raise UsageError(f"--tube-schema and --stream-schema are both {self.tube_schema!r}; give two names")

    @property
    def shown(self) -> str:
        """The database for logs and messages: its password masked, the folder where it is the embedded one."""
        return f"embedded Postgres in {self.data_folder}" if self.database is None else mask_secrets(self.database)


def default_server_name() -> str:
    """This machine's name, as far as it can stand on a line of the protocol."""
    return re.sub(r"[^!-~]", "-", socket.gethostname())[:255] or "replicad"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All of `replicad serve`. `server_name` empty means this machine's name."""

    database: DatabaseSettings = DatabaseSettings()
    listen: Address = setting(
        Address(DEFAULT_HOST, DEFAULT_PORT),
        "Where clients connect; port 0 takes a free one. Beyond the loopback use --token-file and TLS.",
        "HOST:PORT",
        parse_address,
    )
    server_name: str = setting("", "Name that SERVER tells to clients. Default: the machine's name.", "NAME", word)
    token: str | None = setting(None, "Secret that clients must send with AUTH.", "TOKEN", word, secret=True)
    token_file: Path | None = setting(
        None, "File with the secret that clients must send with AUTH. Default: everybody may connect.", "FILE", path
    )
    tls_cert: Path | None = setting(None, "Certificate (chain) in PEM form; turns TLS on.", "FILE", path)
    tls_key: Path | None = setting(None, "Its private key, where it is not in the same file.", "FILE", path)
    ready_file: Path | None = setting(
        None, "File to write HOST:PORT into once clients may connect; removed at the end.", "FILE", path
    )
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not self.server_name:
            object.__setattr__(self, "server_name", default_server_name())
        _take_token(self)
        if self.tls_key is not None and self.tls_cert is None:
            raise UsageError("--tls-key needs --tls-cert, the certificate that the key belongs to")

    def ssl_context(self) -> ssl.SSLContext | None:
        """What the listener needs for TLS, or None where no certificate is set.

        Raises:
            UsageError: a file that cannot be read, or a key that does not belong to the certificate.
        """
        if self.tls_cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            key = f" with --tls-key {self.tls_key}" if self.tls_key else ""
            why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            raise UsageError(f"--tls-cert {self.tls_cert}{key} cannot be used: {why}") from error
        return context


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """All that a command which talks to a daemon needs to reach it."""

    server: Address = setting(
        Address(DEFAULT_HOST, DEFAULT_PORT), "The daemon to connect to.", "HOST:PORT", parse_address
    )
    token: str | None = setting(None, "Secret that the daemon asks for.", "TOKEN", word, secret=True)
    token_file: Path | None = setting(None, "File with the secret that the daemon asks for.", "FILE", path)
    tls_ca: Path | None = setting(
        None, "Connect with TLS and trust this certificate authority (PEM); `system` trusts the system's.", "FILE", path
    )

    def __post_init__(self) -> None:
        if self.server.port == 0:
            raise UsageError(f"--server {self.server}: port 0 cannot be connected to; give the daemon's port")
        _take_token(self)

    def ssl_context(self) -> ssl.SSLContext | None:
        """What the connection needs for TLS, or None for a plain one.

        Raises:
            UsageError: the file cannot be read or holds no certificate.
        """
        return None if self.tls_ca is None else trust(self.tls_ca, "--tls-ca")


def _take_token(settings: ServerSettings | ClientSettings) -> None:
    """Put the content of the token file into `token`: whoever holds the settings need not ask where it came from."""
    if settings.token_file is None:
        return
    if settings.token is not None:
        raise UsageError("REPLICAD_TOKEN and --token-file are both set; give one of them")
    object.__setattr__(settings, "token", read_token(settings.token_file))
    object.__setattr__(settings, "token_file", None)


def read_settings(
    kind: type[T],
    options: Mapping[str, str | None],
    *,
    file: Path | None = None,
    defaults: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Build settings of any kind of this file from texts by field name (None: not given), the environment and a file.

    `file` is TOML; `defaults` take the place of the declared ones, `environ` that of the process's own environment.

    Raises:
        UsageError: naming the option (or variable, or key), its value and the remedy.
    """
    lowest = {**(defaults or {}), **(read_file(file, kind) if file else {})}
    return load(kind, options, os.environ if environ is None else environ, lowest)


def colour_allowed(environ: Mapping[str, str] | None = None) -> bool:
    """False where the user forbids coloured output (https://no-color.org)."""
    return not (os.environ if environ is None else environ).get("NO_COLOR")


LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What goes to stderr, and how it looks."""

    log_level: str = choice("info", "How much to log.", *LOG_LEVELS)
    log_format: str = choice(
        "auto", "How log lines look; auto is text on a terminal and JSON elsewhere.", "auto", "text", "json"
    )
