"""All settings except `limits`, with their defaults: frozen dataclasses that are checked when they are made.

Only this room reads the environment (`REPLICAD_*`) and files of settings, of contexts and of secrets.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from replicad.config.browser_tokens import BrowserKeys, read_browser_keys
from replicad.config.declaring import (
    PATH,
    TEXT,
    Key,
    choice,
    duration,
    flag,
    load,
    matching,
    meant,
    parsed,
    read_file,
    read_table,
    read_toml,
    refuse,
    setting,
    settings_of,
)
from replicad.config.limits import Limits
from replicad.config.secrets import WORD, read_token, refuse_readable_by_others, trust
from replicad.errors import UsageError
from replicad.masking import mask_secrets

if TYPE_CHECKING:
    import ssl

ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"https?://(?:[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


def parse_origins(text: str) -> str:
    """Check `https://a.example.org,http://localhost:3000`, or `*`. Raises ValueError with what to give instead."""
    for one in text.split(","):
        if text != ANY_ORIGIN and not _ORIGIN.fullmatch(one):
            raise ValueError(
                "give origins as browsers send them, in lower case, with commas between: "
                "https://shop.example.org,http://localhost:3000; or * alone"
            )
    return text


T = TypeVar("T")

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9009
MIN_TOKEN = 16  # characters of the daemon's secret

_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252})")
_SCHEMA = matching(
    r"[^\0]{1,63}", "the name of a schema, at most 63 characters", "SCHEMA"
)  # Postgres truncates longer names


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen on or to connect to. Port 0: a free one (for listening only).

    `others`: addresses of other daemons of the same database, to connect to where this one does not answer.
    """

    host: str
    port: int
    others: tuple[Address, ...] = ()

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. False for a name other than `localhost`: it may be any address."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        first = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        return ",".join([first, *map(str, self.others)])


def parse_address(text: str) -> Address:
    """Parse `HOST:PORT`, with an IPv6 address in brackets: `127.0.0.1:9009`, `db1.example.org:9009`, `[::1]:9009`.

    Raises:
        ValueError: with what to give instead.
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
    elif any(not 0 < len(label) < 64 for label in host.removesuffix(".").split(".")):
        raise ValueError(f"{host[:80]} is no name of a host: between its dots are 1 to 63 characters")
    if int(port) > 65535:
        raise ValueError(f"a port is at most 65535, not {port}")
    return Address(host, int(port))


def parse_server(text: str) -> Address:
    """`parse_address` of a daemon; without a port it is DEFAULT_PORT: `db1`, `[::1]`. Raises ValueError."""
    if text.endswith("]") or (text and ":" not in text):
        return parse_address(f"{text}:{DEFAULT_PORT}")
    return parse_address(text)


def parse_servers(text: str) -> Address:
    """`parse_server` of one daemon, or of several with commas between: the first is preferred. Raises ValueError."""
    first, *others = (parse_server(part.strip()) for part in text.split(","))
    return replace(first, others=tuple(others))


def _database(text: str) -> str:
    if not re.match(r"postgres(ql)?://", text):
        raise ValueError("give a URL such as postgresql://user@host:5432/name")
    return text


def _redis(text: str) -> str:
    if not re.match(r"rediss?://[^/]", text):
        raise ValueError("give a URL such as redis://host:6379/0, or rediss://host:6379/0 with TLS")
    return text


DATABASE_URL = parsed("URL", "a URL such as postgresql://user@host:5432/name", _database, "URL")
ADDRESS = parsed("address", "HOST:PORT such as 127.0.0.1:9009", parse_address, "HOST:PORT")
_SERVER = parsed("address", "HOST:PORT such as db1:9009", parse_servers, "HOST[:PORT]")
_ORIGINS = parsed("origins", "origins of pages, with commas between, or *", parse_origins, "ORIGINS")
_REDIS_URL = parsed("URL", "a URL such as redis://host:6379/0", _redis, "URL")


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """The Postgres to use, and the names of replicad's schemas in it."""

    GROUP: ClassVar = "Postgres"

    database: str | None = setting(
        None,
        "Postgres to use, 15 or newer. Default: an embedded one.",
        DATABASE_URL,
        in_repr=False,
        more="`serve` starts the embedded one (extra `embedded`); the other commands use it while it runs.",
    )
    data_folder: Path = setting(Path(".replicad/postgres"), "Data of the embedded Postgres.", PATH, "FOLDER")
    tube_schema: str = setting("tube", "Schema of the tubes and their functions.", _SCHEMA)
    stream_schema: str = setting("replicad", "Schema of the registry of streams.", _SCHEMA)

    def __post_init__(self) -> None:
        if self.tube_schema == self.stream_schema:
            raise UsageError(f"--tube-schema and --stream-schema are both {self.tube_schema!r}; give two names")

    @property
    def shown(self) -> str:
        """The database for logs and messages: the URL without its password, or the folder of the embedded one."""
        return f"embedded Postgres in {self.data_folder}" if self.database is None else mask_secrets(self.database)


def default_server_name() -> str:
    """This machine's name, with `-` for characters that a command cannot contain."""
    return re.sub(r"[^!-~]", "-", socket.gethostname())[:255] or "replicad"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All settings of `replicad serve`. An empty `server_name` becomes this machine's name."""

    database: DatabaseSettings = DatabaseSettings()
    allow_superuser: bool = flag(
        "Let the daemon's role be a superuser of Postgres.",
        group="Postgres",
        more="The role of the embedded one may always be a superuser.",
    )
    wait_for_database: float = duration(
        0,
        "Time for Postgres to answer at the start.",
        0,
        86_400,
        group="Postgres",
        more="0: end at once if it does not answer.",
    )
    listen: Address = setting(
        Address(DEFAULT_HOST, DEFAULT_PORT),
        "Address for clients.",
        ADDRESS,
        group="Addresses and TLS",
        more="Port 0: a free one. For other machines use --token-file and TLS as well.",
    )
    server_name: str = setting(
        "",
        "Name in the command SERVER. Default: the machine's.",
        WORD,
        "NAME",
        group="Addresses and TLS",
    )
    tls_cert: Path | None = setting(
        None, "Certificate (chain) in PEM form; turns TLS on.", PATH, group="Addresses and TLS"
    )
    tls_key: Path | None = setting(
        None, "Private key of --tls-cert, if in another file.", PATH, group="Addresses and TLS"
    )
    tls_client_ca: Path | None = setting(
        None,
        "Certificate authority (PEM) of clients.",
        PATH,
        group="Addresses and TLS",
        more="Without --access-file every client needs a certificate of it.",
    )
    ready_file: Path | None = setting(
        None,
        "File for HOST:PORT once clients may connect.",
        PATH,
        group="Addresses and TLS",
        more="It is removed at the end.",
    )
    token: str | None = setting(
        None, "Secret that clients must send with AUTH.", WORD, "TOKEN", secret=True, group="Access"
    )
    token_file: Path | None = setting(
        None,
        "File with the secret that clients send with AUTH.",
        PATH,
        group="Access",
        more="Default: no secret is needed.",
    )
    access_file: Path | None = setting(
        None,
        "TOML file of clients and of what each may do.",
        PATH,
        group="Access",
        more="It is read again on SIGHUP.",
    )
    insecure: bool = flag(
        "Serve other machines without TLS and secret.",
        group="Access",
        more="It also allows a secret that every user of this machine can read, and one of fewer than 16 characters.",
    )
    http: Address | None = setting(
        None,
        "Address for health checks, metrics, console, rows.",
        ADDRESS,
        group="HTTP and Redis",
        more="It needs the extra `http` and serves /readyz, /metrics, /console and more. Default: none. With TLS and "
        "secrets as for clients.",
    )
    http_origins: str | None = setting(
        None,
        "Origins of web pages that may read rows, or *.",
        _ORIGINS,
        group="HTTP and Redis",
        more="The pages read over --http. Origins are such as https://shop.example.org, with commas between; *: all. "
        "Default: none.",
    )
    browser_key: Path | None = setting(
        None,
        "File of the keys of browser tokens.",
        PATH,
        group="HTTP and Redis",
        more="Pages read rows over --http with such tokens. Keys are secrets of HS256, public keys in PEM (RS256, "
        "ES256), or a JWK set; read again on SIGHUP. Needs --access-file or --token-file.",
    )
    redis: str | None = setting(
        None,
        "Redis to publish all streams to as well.",
        _REDIS_URL,
        in_repr=False,
        group="HTTP and Redis",
        more="It needs the extra `redis`; rediss:// is with TLS. Default: none. A password is better given by "
        "REPLICAD_REDIS_PASSWORD.",
    )
    redis_password: str | None = setting(
        None, "Password for --redis.", TEXT, "PASSWORD", secret=True, group="HTTP and Redis"
    )
    redis_ca: Path | None = setting(
        None,
        "Certificate authority (PEM) of the Redis.",
        PATH,
        group="HTTP and Redis",
        more="It is for rediss://. Default: the authorities of the system.",
    )
    redis_announce: Address | None = setting(
        None,
        "Address at which followers over Redis reach this.",
        ADDRESS,
        group="HTTP and Redis",
        more="Clients that follow over Redis ask the daemon there for rows that they missed. Default: --listen, unless "
        "that is a wildcard.",
    )
    late_rows: str = choice(
        "deliver",
        "What to do with late rows.",
        "deliver",
        "report",
        group="Streams",
        more="A late row is found at or below a published position. deliver: readers are sent back to the position "
        "before the first of them; report: they are only reported.",
    )
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not self.server_name:
            object.__setattr__(self, "server_name", default_server_name())
        if self.token_file is not None and not self.insecure:
            refuse_readable_by_others(self.token_file, "--token-file")
        _read_token_file(self)
        if self.tls_key is not None and self.tls_cert is None:
            raise UsageError("--tls-key needs --tls-cert, the certificate of the key")
        if self.redis is None and (self.redis_password or self.redis_ca or self.redis_announce):
            raise UsageError("--redis-ca, --redis-announce and REPLICAD_REDIS_PASSWORD need --redis URL")
        if self.browser_key is not None and (self.http is None or (self.token is None and self.access_file is None)):
            raise UsageError(
                "--browser-key needs --http, and --access-file or --token-file: without a secret everybody may read"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise UsageError("--tls-client-ca needs --tls-cert: clients send certificates only to a server with TLS")

    @property
    def exposed(self) -> str:
        """The option and the address that other machines can reach, as `--listen HOST:PORT`; empty if there is none."""
        for option, address in (("--listen", self.listen), ("--http", self.http)):
            if address is not None and not address.is_loopback:
                return f"{option} {address}"
        return ""

    @property
    def exposure(self) -> str | None:
        """The protection that is missing although other machines can reach the daemon; None: nothing is missing."""
        if not self.exposed:
            return None
        known = self.token is not None or self.access_file is not None or self.tls_client_ca is not None
        missing = [] if known else ["a secret (--token-file, REPLICAD_TOKEN or --access-file)"]
        missing += [] if self.tls_cert is not None else ["TLS (--tls-cert)"]
        return " and without ".join(missing) or None

    def refuse_careless(self) -> None:
        """Refuse settings that are rarely meant: a daemon that every machine can use, or a secret that protects
        nothing.

        Raises:
            UsageError: with the remedy.
        """
        if self.insecure:
            return
        missing = self.exposure
        if missing is not None and " and without " in missing:
            raise UsageError(
                f"{self.exposed}: other machines can reach this address, without {missing}; give one of them, "
                "listen on 127.0.0.1, or say --insecure if everybody who can reach it may do everything"
            )
        if self.token is not None and len(self.token) < MIN_TOKEN:
            raise UsageError(
                f"the token has {len(self.token)} characters, which can be guessed; give at least {MIN_TOKEN}, such as "
                "those that `openssl rand -hex 32` prints, or say --insecure"
            )
        if self.tls_cert is not None:
            refuse_readable_by_others(self.tls_key or self.tls_cert, "--tls-key" if self.tls_key else "--tls-cert")

    @property
    def browser_keys(self) -> Callable[[], BrowserKeys] | None:
        """Reads the keys of browser tokens; None without --browser-key."""
        file = self.browser_key
        if file is None:
            return None
        return lambda: read_browser_keys(file, {self.server_name}, insecure=self.insecure)

    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS for the listener; None without a certificate.

        Raises:
            UsageError: a file cannot be read, or the key is not that of the certificate.
        """
        if self.tls_cert is None:
            return None
        import ssl  # noqa: PLC0415 - see `trust`

        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # A client that closes its side without a close_notify is answered first, as without TLS. It can cut nothing
        # off: only whole lines count. Without the option OpenSSL sends nothing more after such an end.
        context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as error:
            key = f" with --tls-key {self.tls_key}" if self.tls_key else ""
            why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            raise UsageError(f"--tls-cert {self.tls_cert}{key} cannot be used: {why}") from error
        if self.tls_client_ca is not None:
            try:
                context.load_verify_locations(self.tls_client_ca)
            except OSError as error:
                raise UsageError(f"--tls-client-ca {self.tls_client_ca} cannot be used: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED if self.access_file is None else ssl.CERT_OPTIONAL
        return context


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The settings of a command that connects to a daemon."""

    GROUP: ClassVar = "Daemon"

    server: Address = setting(
        Address(DEFAULT_HOST, DEFAULT_PORT), "The daemon to connect to; several with commas.", _SERVER
    )
    token: str | None = setting(None, "Secret that the daemon asks for.", WORD, "TOKEN", secret=True)
    token_file: Path | None = setting(None, "File with the secret that the daemon asks for.", PATH)
    tls_ca: Path | None = setting(
        None, "Connect with TLS and trust this certificate authority (PEM); `system` trusts the system's.", PATH
    )
    tls_client_cert: Path | None = setting(
        None, "Certificate (chain, PEM) to show to the daemon, if it knows clients by certificates.", PATH
    )
    tls_client_key: Path | None = setting(None, "Private key of --tls-client-cert, if it is in another file.", PATH)

    def __post_init__(self) -> None:
        if 0 in (self.server.port, *(other.port for other in self.server.others)):
            raise UsageError(f"--server {self.server}: port 0 is for listening only; give the daemon's port")
        if self.tls_client_key is not None and self.tls_client_cert is None:
            raise UsageError("--tls-client-key needs --tls-client-cert, the certificate of the key")
        if self.tls_client_cert is not None and self.tls_ca is None:
            raise UsageError("--tls-client-cert needs --tls-ca: without TLS no certificate is shown")
        _read_token_file(self)

    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS for the connection; None for a plain one.

        Raises:
            UsageError: a file cannot be read, or the key is not that of the certificate.
        """
        if self.tls_ca is None:
            return None
        context = trust(self.tls_ca, "--tls-ca")
        if self.tls_client_cert is not None:
            try:
                context.load_cert_chain(self.tls_client_cert, self.tls_client_key)
            except OSError as error:
                raise UsageError(f"--tls-client-cert {self.tls_client_cert} cannot be used: {error}") from error
        return context


def _read_token_file(settings: ServerSettings | ClientSettings) -> None:
    """Read the token file into `token`."""
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
    """Build settings of any kind from options by field name (None: not given), the environment and a TOML file.

    `defaults` replace the declared ones, `environ` the environment of the process.

    Raises:
        UsageError: with the option (or variable, or key), its value and what to give instead.
    """
    found = read_file(file, kind) if file else {}
    insecure = found.get("insecure") is True or options.get("insecure") == "true"
    if file and kind is ServerSettings and "token" in found and not insecure:
        refuse_readable_by_others(file, "--config: it has the token")
    return load(kind, options, os.environ if environ is None else environ, found, defaults)


def colour_allowed(environ: Mapping[str, str] | None = None) -> bool:
    """False if the user forbids coloured output (https://no-color.org)."""
    return not (os.environ if environ is None else environ).get("NO_COLOR")


LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The settings of the logs on stderr."""

    GROUP: ClassVar = "Logs"

    log_level: str = choice("info", "How much to log.", *LOG_LEVELS)
    log_format: str = choice(
        "auto", "Form of log lines.", "auto", "text", "json", more="auto: text on a terminal, otherwise JSON."
    )


# Named contexts: databases and daemons that commands work on, in a TOML file of the user's, with a table for each. The
# keys are the settings of commands that name a database or a daemon. `serve` has a file of its own (--config).

CONTEXTS_VARIABLE = "REPLICAD_CONTEXTS"  # where the file is
CONTEXT_VARIABLE = "REPLICAD_CONTEXT"  # the context of commands that are not given --context
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HTTP = Key("http", ADDRESS, help="Address of `serve --http`.")

CONTEXT_KEYS: Mapping[str, Key] = {
    made.name: made for made in (*settings_of(DatabaseSettings), *settings_of(ClientSettings), _HTTP) if not made.secret
}
"""The settings that a context may have, by name."""


@dataclass(frozen=True, slots=True)
class CommandContext:
    """A context: its values as text, by the name of the setting. All of them are valid."""

    name: str
    values: Mapping[str, str]


def contexts_file(environ: Mapping[str, str] | None = None) -> Path:
    """The file of contexts: REPLICAD_CONTEXTS, or replicad/contexts.toml in the user's folder of settings."""
    environ = os.environ if environ is None else environ
    named = environ.get(CONTEXTS_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "replicad/contexts.toml"


def read_contexts(file: Path) -> dict[str, CommandContext]:
    """The contexts of the file by name; none if there is no file.

    Raises:
        UsageError: it cannot be read, or something in it is wrong; others can read it, and it has a password.
    """
    if not file.exists():
        return {}
    found = {name: _context(name, values, file) for name, values in read_toml(file).items()}
    if any(mask_secrets(value) != value for one in found.values() for value in one.values.values()):
        refuse_readable_by_others(file, "it has a password")
    return found


def _context(name: str, values: object, file: Path) -> CommandContext:
    if not isinstance(values, dict):
        raise UsageError(f"{file}: {name} stands outside of a context; write [NAME] before it")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{file}: {name[:80]!r} is no name of a context; take letters, digits, . _ and -")
    read_table(values, tuple(CONTEXT_KEYS.values()), lambda key: f"{file}: {key} of context {name}", refuse)
    return CommandContext(name, dict(values))  # as texts: they take the way of options


def find_context(name: str, file: Path) -> CommandContext:
    """The context of that name. Raises UsageError: there is none, or the file is wrong."""
    known = read_contexts(file)
    if name not in known:
        raise UsageError(f"there is no context {name!r} in {file}; {meant(name, known)}")
    return known[name]
