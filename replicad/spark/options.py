"""The options of `spark.readStream.format("replicad")`, checked before anything connects.

`OPTIONS` has the name, the default, the parser and the use of each option. An option that is unknown, invalid or in
conflict with another is refused; none is ignored. `endpoint_of` and `retries_of` make the connection of a query.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Flag, auto
from typing import Any

from replicad.client.blocking_client import Endpoint
from replicad.config.declaring import (
    FLAG,
    SECONDS,
    WHOLE,
    Key,
    ValueKind,
    matching,
    nearest,
    one_of,
    parsed,
    setting,
    settings_of,
)
from replicad.config.secrets import WORD, read_token
from replicad.errors import BadToken, UsageError
from replicad.protocol.tokens import Vector
from replicad.retry import Backoff, Retries
from replicad.tubes.commands import ENCODINGS
from replicad.tubes.keys import BIGINT, KINDS

EARLIEST, LATEST = "earliest", "latest"
AUTO = "auto"
MOST_ISLANDS = 64  # each has a thread and some connections on the driver
LEASE_SLACK = 5.0  # seconds after a lease's time to live within which the daemon notices that it is expired


class Use(Flag):
    """Where an option may be used."""

    TUBE_STREAM = auto()  # a streaming query on a tube
    TUBE_BATCH = auto()
    STREAM_STREAM = auto()  # a streaming query on a stream
    STREAM_BATCH = auto()
    TUBE = TUBE_STREAM | TUBE_BATCH
    STREAM = STREAM_STREAM | STREAM_BATCH
    STREAMING = TUBE_STREAM | STREAM_STREAM
    ALL = TUBE | STREAM


_USE_NAMES = {
    Use.TUBE_STREAM: "a streaming query on a tube",
    Use.TUBE_BATCH: "a batch read of a tube",
    Use.STREAM_STREAM: "a streaming query on a stream",
    Use.STREAM_BATCH: "a batch read of a stream",
}

_FILE = matching(r"[^\0]{1,4096}", "a path")


def _islands(text: str) -> tuple[IslandAddress, ...]:
    found = []
    for entry in text.split(","):
        parsed = re.fullmatch(r"\s*(?:([^\s=,\"]{1,100})=)?(\[[0-9A-Fa-f:.]+\]|[^\s:=\[\]]+):([0-9]{1,5})\s*", entry)
        if parsed is None or not 1 <= int(parsed[3]) <= 65535:
            raise ValueError("give daemons such as east=db1:9009,west=db2:9009")
        found.append(IslandAddress(parsed[1] or f"{parsed[2]}:{parsed[3]}", parsed[2].strip("[]"), int(parsed[3])))
    if len({island.name for island in found}) < len(found):
        raise ValueError("give each island a different name")
    if len(found) > MOST_ISLANDS:
        raise ValueError(f"give at most {MOST_ISLANDS}")
    return tuple(found)


def _starting_offsets(text: str) -> str:
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    try:
        Vector.parse(text)
    except BadToken:
        raise ValueError("give earliest, latest or a token such as 58~2.61") from None
    return text


@dataclass(frozen=True, slots=True)
class IslandAddress:
    """A daemon of a query that reads several, each with its own database. The checkpoint has it by its name."""

    name: str
    host: str
    port: int


_ISLANDS = parsed("islands", "daemons such as east=db1:9009,west=db2:9009", _islands)
_OFFSETS = parsed("offsets", "earliest, latest or a token such as 58~2.61", _starting_offsets)


def _option(name: str, kind: ValueKind, default: Any, use: Use, help: str, *bounds: float) -> Any:
    """A field of SourceOptions. `bounds` of a number: the minimum, or minimum and maximum."""
    low, high = (*bounds, None, None)[:2]
    return setting(default, help, kind, minimum=low, maximum=high, secret=name == "token", name=name, use=use)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """All options of a source, parsed and checked. Times are in seconds; None: no default."""

    host: str = _option("host", WORD, "127.0.0.1", Use.ALL, "host of the daemon")
    port: int = _option("port", WHOLE, 9009, Use.ALL, "port of the daemon", 1, 65535)
    islands: tuple[IslandAddress, ...] | None = _option(
        "islands",
        _ISLANDS,
        None,
        Use.TUBE_STREAM,
        "several daemons instead of host and port, each with a tube of that name: name=host:port,...",
    )
    token: str | None = _option("token", WORD, None, Use.ALL, "secret that the daemon asks for")
    token_file: str | None = _option(
        "tokenFile", _FILE, None, Use.ALL, "file with that secret, readable on the driver and all executors"
    )
    tls_ca: str | None = _option(
        "tlsCa", _FILE, None, Use.ALL, "connect with TLS and trust this authority (PEM file, or `system`)"
    )
    server_name: str | None = _option("serverName", WORD, None, Use.ALL, "name that the daemon must give")
    connect_timeout: float = _option("connectTimeout", SECONDS, 10.0, Use.ALL, "limit for one connection", 0.001, 3600)
    num_retries: int = _option("numRetries", WHOLE, 10, Use.ALL, "retries after a lost connection", 0, 1000)
    retry_interval: float = _option(
        "retryInterval", SECONDS, 0.1, Use.ALL, "pause before the first retry; each one doubles, up to 5 s", 0, 3600
    )
    tube: str | None = _option("tube", WORD, None, Use.TUBE, "tube to read")
    stream: str | None = _option("stream", WORD, None, Use.STREAM, "stream to read")
    changes: bool = _option(
        "changes",
        FLAG,
        False,
        Use.STREAM,
        "the stream is of changes: their columns have the types of the table's columns",
    )
    starting_offsets: str = _option(
        "startingOffsets",
        _OFFSETS,
        EARLIEST,
        Use.ALL,
        "where a new query begins: earliest (tubes); earliest, latest or a token (streams)",
    )
    max_pods: int = _option("maxPodsPerTrigger", WHOLE, 10_000, Use.TUBE_STREAM, "pods in a micro-batch at most", 1)
    max_ids: int | None = _option(
        "maxIdsPerTrigger", WHOLE, None, Use.TUBE_STREAM, "ids in a micro-batch, about; a pod is never split", 1
    )
    max_ids_of_task: int | None = _option(
        "maxIdsPerTask",
        WHOLE,
        None,
        Use.TUBE_STREAM,
        "ids of each partition in a micro-batch, about; limits the memory of a task",
        1,
    )
    max_backfill_pods: int = _option(
        "maxBackfillPodsPerTrigger",
        WHOLE,
        1_000,
        Use.TUBE_STREAM,
        "backfill pods among them; 0: none",
        0,
    )
    min_pods: int | None = _option("minPodsPerTrigger", WHOLE, None, Use.TUBE_STREAM, "wait for that many pods", 1)
    max_trigger_delay: float = _option(
        "maxTriggerDelay", SECONDS, 900.0, Use.TUBE_STREAM, "longest wait for minPodsPerTrigger", 0.001, 86400
    )
    max_offsets: int = _option(
        "maxOffsetsPerTrigger",
        WHOLE,
        100_000,
        Use.STREAM_STREAM,
        "largest move of the token in a micro-batch, from its first row on",
        1,
    )
    poll_timeout: float = _option(
        "pollTimeout", SECONDS, 1.0, Use.STREAMING, "how long a trigger waits for new data", 0, 300
    )
    consumer: str | None = _option("consumer", WORD, None, Use.TUBE, "name under which the lease is held")
    holder: str | None = _option(
        "holder",
        WORD,
        None,
        Use.TUBE_STREAM,
        "exact holder of the lease, for a program that restarts its own query; default: a unique name",
    )
    lease_ttl: float = _option(
        "leaseTtl", SECONDS, 30.0, Use.TUBE, "time after which the lease of a crashed query expires", 0.1, 86400
    )
    lease_wait: float | None = _option(
        "leaseWait",
        SECONDS,
        None,
        Use.TUBE,
        "how long to wait for a tube that another query holds; default: until the lease of a crashed query expires",
        0,
        30 * 86400,
    )
    keys: str = _option(
        "keys", one_of(*KINDS), BIGINT, Use.TUBE, "kind of the tube's ids; text if it has keys that are not one integer"
    )
    include_payload: bool = _option("includePayload", FLAG, False, Use.TUBE, "add the column payload (JSON text)")
    encoding: str = _option(
        "encoding",
        one_of(AUTO, *ENCODINGS, any_case=True),
        AUTO,
        Use.TUBE,
        "form in which the daemon sends pods: lines, arrow (blocks), or auto: arrow if the daemon supports it",
    )
    fail_on_data_loss: bool = _option("failOnDataLoss", FLAG, True, Use.ALL, "fail if planned pods or rows are missing")

    @property
    def what(self) -> str:
        """The source, for messages: `tube cities` or `stream events`."""
        return f"tube {self.tube}" if self.tube is not None else f"stream {self.stream}"

    def by_island(self) -> dict[str, SourceOptions]:
        """The options of each island's reader, by name. Without islands: the options of the one daemon, by the name
        "".
        """
        if self.islands is None:
            return {"": self}
        return {one.name: replace(self, islands=None, host=one.host, port=one.port) for one in self.islands}

    @property
    def claim_wait(self) -> float:
        """Seconds to wait for a lease that another holds."""
        return self.lease_ttl + LEASE_SLACK if self.lease_wait is None else self.lease_wait


OPTIONS: tuple[Key, ...] = tuple(settings_of(SourceOptions))
_FIELDS = {key.name: entry.name for key, entry in zip(OPTIONS, fields(SourceOptions), strict=True)}
USES: dict[str, Use] = {
    key.name: entry.metadata["use"] for key, entry in zip(OPTIONS, fields(SourceOptions), strict=True)
}
_BY_KEY = {option.name.lower(): option for option in OPTIONS}


def parse_options(given: Mapping[str, str], *, streaming: bool | None = None) -> SourceOptions:
    """Parse Spark's options (names in any case). `streaming` None: unknown yet whether a query or a batch read.

    Raises:
        UsageError: an option is unknown, invalid, or in conflict with another; the message lists the options.
    """
    values: dict[str, Any] = {}
    for key, text in given.items():
        option = _BY_KEY.get(key.lower())
        if option is None:
            raise _unknown(key)
        if text is not None:
            values[option.name] = option.read(text, f"option {option.name}")
    options = SourceOptions(**{_FIELDS[name]: value for name, value in values.items()})
    _check(options, values, streaming)
    return options


def _check(options: SourceOptions, given: Mapping[str, Any], streaming: bool | None) -> None:
    if (options.tube is None) == (options.stream is None):
        raise UsageError(
            "options tube and stream are both given; give one of them"
            if options.tube
            else f"nothing to read; give the option tube or stream. {_listed()}"
        )
    if options.token is not None and options.token_file is not None:
        raise UsageError("options token and tokenFile are both given; give one of them")
    if options.islands is not None and ("host" in given or "port" in given):
        raise UsageError("option islands names hosts and ports itself; leave host and port out")
    use = _use(options.tube is not None, streaming)
    for name in given:
        if not USES[name] & use:
            where = " or ".join(text for flag, text in _USE_NAMES.items() if flag & use)
            fitting = ", ".join(name for name, fits in USES.items() if fits & use)
            raise UsageError(f"option {name} cannot be used with {where}; there are {fitting}")
    if options.tube is not None and options.starting_offsets != EARLIEST:
        raise UsageError(
            f"option startingOffsets: a tube is read from {EARLIEST}, its first pod that was not acked; "
            f"{options.starting_offsets!r} is for streams only"
        )
    if options.min_pods is not None and options.min_pods > options.max_pods:
        raise UsageError(
            f"option minPodsPerTrigger={options.min_pods} is above maxPodsPerTrigger={options.max_pods}; "
            "raise the latter"
        )
    if options.holder is not None and options.consumer is not None:
        raise UsageError("options holder and consumer are both given; give one of them")
    if options.min_pods is None and "maxTriggerDelay" in given:
        raise UsageError("option maxTriggerDelay needs minPodsPerTrigger, the number of pods to wait for")


def _use(tube: bool, streaming: bool | None) -> Use:
    use = Use.TUBE if tube else Use.STREAM
    if streaming is None:
        return use
    return use & (Use.STREAMING if streaming else ~Use.STREAMING)


def _unknown(key: str) -> UsageError:
    near = nearest(key.lower(), _BY_KEY)
    hint = "" if near is None else f"; did you mean {_BY_KEY[near].name}?"
    return UsageError(f"option {key!r} is not known{hint or '.'} {_listed()}")


def _listed() -> str:
    return "The options are " + ", ".join(option.name for option in OPTIONS)


LONGEST_PAUSE = 5.0  # seconds between two tries


def endpoint_of(options: SourceOptions, *, timeout: float | None = None) -> Endpoint:
    """Where to connect to. Reads the file of the token.

    `timeout` in seconds, for the connection and for an answer, overrides the options.

    Raises:
        UsageError: the file of the token cannot be read.
    """
    return Endpoint(
        options.host,
        options.port,
        token=options.token if options.token_file is None else read_token(options.token_file, "option tokenFile"),
        server_name=options.server_name,
        connect_timeout=options.connect_timeout if timeout is None else timeout,
        tls_ca=options.tls_ca,
        **({} if timeout is None else {"answer_timeout": timeout}),
    )


def retries_of(options: SourceOptions) -> Retries:
    """The number of retries and the pauses of the options."""
    return Retries(options.retry_interval, LONGEST_PAUSE, most=options.num_retries)


def patience_of(options: SourceOptions) -> float:
    """The sum in seconds of all pauses, for clients that retry by themselves."""
    backoff = Backoff(options.retry_interval, LONGEST_PAUSE)
    return sum(backoff.whole(tries) for tries in range(options.num_retries))
