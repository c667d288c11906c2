"""The options of `spark.readStream.format("replicad")`: one table, checked as a whole before anything connects.

What an option is called, its default, how its text is read and where it may be used stands in `OPTIONS` and nowhere
else. An option that is unknown, does not fit or contradicts another is refused; nothing is ignored in silence.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Flag, auto
from typing import Any

from replicad.config.declaring import seconds, text_of, whole_number
from replicad.errors import BadToken, UsageError
from replicad.protocol.tokens import Vector
from replicad.tubes.commands import ENCODINGS

EARLIEST, LATEST = "earliest", "latest"
AUTO = "auto"
MOST_ISLANDS = 64  # each has a thread and some connections on the driver
LEASE_SLACK = 5.0  # seconds beyond a lease's time to live until a dead holder is sure to be out of the way


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

_word = text_of(r"[!-~]{1,1024}", "give one word of printable ASCII without blanks")
_path = text_of(r"[^\0]{1,4096}", "give a path")


def _count(least: int, most: int = 1 << 62) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = whole_number(text)
        if not least <= value <= most:
            raise ValueError(f"give a whole number from {least} to {most}")
        return value

    return read


def _time(least: float, most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = seconds(text)
        if not least <= value <= most:
            raise ValueError(f"give seconds from {least:g} to {most:g}, such as 30s, 500ms or 2m")
        return value

    return read


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("give true or false")
    return text.lower() == "true"


def _encoding(text: str) -> str:
    if text.lower() not in (AUTO, *ENCODINGS):
        raise ValueError(f"give {AUTO}, {' or '.join(ENCODINGS)}")
    return text.lower()


def _islands(text: str) -> tuple[Island, ...]:
    found = []
    for entry in text.split(","):
        parsed = re.fullmatch(r"\s*(?:([^\s=,\"]{1,100})=)?(\[[0-9A-Fa-f:.]+\]|[^\s:=\[\]]+):([0-9]{1,5})\s*", entry)
        if parsed is None or not 1 <= int(parsed[3]) <= 65535:
            raise ValueError("give daemons such as east=db1:9009,west=db2:9009")
        found.append(Island(parsed[1] or f"{parsed[2]}:{parsed[3]}", parsed[2].strip("[]"), int(parsed[3])))
    if len({island.name for island in found}) < len(found):
        raise ValueError("each island needs a name of its own")
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
class Island:
    """A daemon on a database of its own, one of several that a query reads. The checkpoint knows it by its name."""

    name: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name in Spark, how its text becomes a value, where it may be used, and what it does."""

    name: str
    parse: Callable[[str], Any]
    use: Use
    help: str


def _option(name: str, parse: Callable[[str], Any], default: Any, use: Use, help: str) -> Any:
    secret = name == "token"
    return field(default=default, repr=not secret, metadata={"option": Option(name, parse, use, help)})


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """All options of a source, read and checked. Times are seconds; None where there is no default."""

    host: str = _option("host", _word, "127.0.0.1", Use.ALL, "host of the daemon")
    port: int = _option("port", _count(1, 65535), 9009, Use.ALL, "port of the daemon")
    islands: tuple[Island, ...] | None = _option(
        "islands",
        _islands,
        None,
        Use.TUBE_STREAM,
        "several daemons in place of host and port, each with a tube of that name: name=host:port,...",
    )
    token: str | None = _option("token", _word, None, Use.ALL, "secret that the daemon asks for")
    token_file: str | None = _option(
        "tokenFile", _path, None, Use.ALL, "file with that secret, readable wherever a task may run"
    )
    tls_ca: str | None = _option(
        "tlsCa", _path, None, Use.ALL, "connect with TLS and trust this authority (PEM file, or `system`)"
    )
    server_name: str | None = _option("serverName", _word, None, Use.ALL, "name that the daemon must give")
    connect_timeout: float = _option("connectTimeout", _time(0.001, 3600), 10.0, Use.ALL, "limit for one connection")
    num_retries: int = _option("numRetries", _count(0, 1000), 10, Use.ALL, "retries after a lost connection")
    retry_interval: float = _option(
        "retryInterval", _time(0, 3600), 0.1, Use.ALL, "pause before the first retry; each one doubles, up to 5 s"
    )
    tube: str | None = _option("tube", _word, None, Use.TUBE, "tube to read")
    stream: str | None = _option("stream", _word, None, Use.STREAM, "stream to read")
    starting_offsets: str = _option(
        "startingOffsets",
        _starting_offsets,
        EARLIEST,
        Use.ALL,
        "where a new query begins: earliest (tubes); earliest, latest or a token (streams)",
    )
    max_pods: int = _option("maxPodsPerTrigger", _count(1), 10_000, Use.TUBE_STREAM, "pods in a micro-batch at most")
    max_ids: int | None = _option(
        "maxIdsPerTrigger", _count(1), None, Use.TUBE_STREAM, "ids in a micro-batch, about; a pod is never split"
    )
    max_backfill_pods: int = _option(
        "maxBackfillPodsPerTrigger", _count(0), 1_000, Use.TUBE_STREAM, "backfill pods among them; 0 leaves them out"
    )
    min_pods: int | None = _option("minPodsPerTrigger", _count(1), None, Use.TUBE_STREAM, "wait for that many pods")
    max_trigger_delay: float = _option(
        "maxTriggerDelay", _time(0.001, 86400), 900.0, Use.TUBE_STREAM, "but no longer than that"
    )
    max_offsets: int = _option(
        "maxOffsetsPerTrigger", _count(1), 100_000, Use.STREAM_STREAM, "how far a token moves in a micro-batch at most"
    )
    poll_timeout: float = _option(
        "pollTimeout", _time(0, 300), 1.0, Use.STREAMING, "how long a trigger waits for something to come"
    )
    consumer: str | None = _option("consumer", _word, None, Use.TUBE, "name under which the lease is held")
    holder: str | None = _option(
        "holder",
        _word,
        None,
        Use.TUBE_STREAM,
        "exact holder of the lease, for a program that restarts its own query; default: one that nobody else has",
    )
    lease_ttl: float = _option(
        "leaseTtl", _time(0.1, 86400), 30.0, Use.TUBE, "time after which the lease of a dead query is free"
    )
    lease_wait: float | None = _option(
        "leaseWait",
        _time(0, 30 * 86400),
        None,
        Use.TUBE,
        "how long to wait for a tube that another query holds; default: until a dead one's lease has run out",
    )
    include_payload: bool = _option("includePayload", _flag, False, Use.TUBE, "add the column payload (JSON text)")
    encoding: str = _option(
        "encoding",
        _encoding,
        AUTO,
        Use.TUBE,
        "how pods come: lines, arrow (in blocks), or auto: arrow where it can be had",
    )
    fail_on_data_loss: bool = _option(
        "failOnDataLoss", _flag, True, Use.ALL, "fail where pods or rows that were planned are gone"
    )

    @property
    def what(self) -> str:
        """What is read, for messages: `tube cities` or `stream events`."""
        return f"tube {self.tube}" if self.tube is not None else f"stream {self.stream}"

    def by_island(self) -> dict[str, SourceOptions]:
        """The options of each island's reader, by name; of the one daemon where there are no islands."""
        if self.islands is None:
            return {"": self}
        return {one.name: replace(self, islands=None, host=one.host, port=one.port) for one in self.islands}

    @property
    def claim_wait(self) -> float:
        """Seconds to wait for a lease that another holds."""
        return self.lease_ttl + LEASE_SLACK if self.lease_wait is None else self.lease_wait


OPTIONS: tuple[Option, ...] = tuple(entry.metadata["option"] for entry in fields(SourceOptions))
_FIELDS = {entry.metadata["option"].name: entry.name for entry in fields(SourceOptions)}
_BY_KEY = {option.name.lower(): option for option in OPTIONS}


def parse_options(given: Mapping[str, str], *, streaming: bool | None = None) -> SourceOptions:
    """Read Spark's options (names in any case). `streaming` None: not known yet whether it is a query or a batch read.

    Raises:
        UsageError: an option is unknown, does not fit, or contradicts another; the message lists those that there are.
    """
    values: dict[str, Any] = {}
    for key, text in given.items():
        option = _BY_KEY.get(key.lower())
        if option is None:
            raise _unknown(key)
        if text is None:
            continue
        try:
            values[option.name] = option.parse(text)
        except ValueError as error:
            shown = "the value" if option.name == "token" else repr(text)
            raise UsageError(f"option {option.name}: {shown} does not fit; {error}") from None
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
        if not _BY_KEY[name.lower()].use & use:
            where = " or ".join(text for flag, text in _USE_NAMES.items() if flag & use)
            fitting = ", ".join(option.name for option in OPTIONS if option.use & use)
            raise UsageError(f"option {name} does not go with {where}; there are {fitting}")
    if options.tube is not None and options.starting_offsets != EARLIEST:
        raise UsageError(
            f"option startingOffsets: a tube is read from {EARLIEST}, its first pod that was not acked; "
            f"{options.starting_offsets!r} goes with streams only"
        )
    if options.min_pods is not None and options.min_pods > options.max_pods:
        raise UsageError(
            f"option minPodsPerTrigger={options.min_pods} is above maxPodsPerTrigger={options.max_pods}: "
            "no micro-batch could ever be both; raise the latter"
        )
    if options.holder is not None and options.consumer is not None:
        raise UsageError("options holder and consumer are both given; give one of them")
    if options.min_pods is None and "maxTriggerDelay" in given:
        raise UsageError("option maxTriggerDelay goes with minPodsPerTrigger, the number of pods to wait for")


def _use(tube: bool, streaming: bool | None) -> Use:
    use = Use.TUBE if tube else Use.STREAM
    if streaming is None:
        return use
    return use & (Use.STREAMING if streaming else ~Use.STREAMING)


def _unknown(key: str) -> UsageError:
    near = difflib.get_close_matches(key.lower(), _BY_KEY, n=1)
    hint = f"did you mean {_BY_KEY[near[0]].name}? " if near else ""
    return UsageError(f"unknown option {key!r}; {hint}{_listed()}")


def _listed() -> str:
    return "The options are " + ", ".join(option.name for option in OPTIONS)
