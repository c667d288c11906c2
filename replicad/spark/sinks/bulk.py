"""A search index as the downstream: the `_bulk` API of Elasticsearch and OpenSearch, over HTTP.

At least once: a repeated batch writes the same documents under the same ids. The version of a document is the number of
the pod for which its row was loaded (`external_gte`), so the index refuses an older row of a node that was paused. It
forgets the version of a deleted document after `index.gc_deletes` (60 s); so rows that were loaded longer ago than
`_FRESH` seconds are not sent, but loaded again. If the index refuses a document (another mapping), the batch fails with
the reason. If the index is too busy, the document is sent again. Uses `http.client`, one connection per worker.
"""

from __future__ import annotations

import base64
import datetime
import functools
import http.client
import json
import math
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import MAX_PREC, Context, Decimal
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa

from replicad.errors import DownstreamError, DownstreamUnavailable, RowRefused, UsageError
from replicad.masking import mask_secrets
from replicad.retry import Retries
from replicad.spark.columns import ColumnType
from replicad.spark.enrich import EnrichedRows
from replicad.spark.sinks.base import Applied, BatchId, Shape, Sink

_DIGITS_OF_LONG = 18
_FRESH = 45.0  # seconds from the load of a row to its write; less than the 60 s of index.gc_deletes
_METADATA = frozenset({
    "_id", "_index", "_type", "_source", "_routing", "_field_names", "_ignored", "_ignored_source", "_meta", "_tier",
    "_doc_count", "_size", "_nested_path", "_version", "_seq_no", "_primary_term", "_data_stream_timestamp",
    "_inference_fields", "_recovery_source", "_tsid", "_ts_routing_hash",
})  # fmt: skip
_CONFLICT = 409  # with external versions: the index has a later version
_VERSION = re.compile(r"current version \[(\d+)\]")
Encode = Callable[[Any], str]


def documents_of(rows: pa.Table, types: Mapping[str, str], names: Mapping[str, str], *, objects: bool) -> Iterator[str]:
    """The rows as JSON texts of one line each. `types`: the types of columns in Postgres, where they are known.

    `names` has other names for some columns. `objects`: JSON in a column becomes a part of the document, not a text.

    Raises:
        RowRefused: a text of such a column is not JSON.
    """
    keys = [json.dumps(names.get(name, name), ensure_ascii=False) for name in rows.schema.names]
    columns = []
    for column in rows.schema:
        encode = _encoder(column, ColumnType.parse(types.get(column.name, "")), objects=objects)
        columns.append([encode(value) for value in rows.column(column.name).to_pylist()])
    for values in zip(*columns, strict=True):
        yield "{" + ",".join(f"{key}:{value}" for key, value in zip(keys, values, strict=True)) + "}"


def _encoder(field: pa.Field, known: ColumnType, *, objects: bool) -> Encode:
    if pa.types.is_decimal(field.type):
        return _whole if field.type.scale == 0 and field.type.precision <= _DIGITS_OF_LONG else _decimal
    if pa.types.is_string(field.type) and not known.is_list:
        if known.name == "numeric":
            return _number
        if known.name in ("json", "jsonb") and objects:
            return _json
    for applies, encode in _ENCODERS:
        if applies(field.type):
            return encode
    return _value


def _integer(value: int | None) -> str:
    return "null" if value is None else str(value)


def _float(value: float | None) -> str:
    return "null" if value is None or not math.isfinite(value) else repr(value)


def _time(value: datetime.date | None) -> str:  # datetimes are dates
    return "null" if value is None else f'"{value.isoformat()}"'


def _whole(value: Decimal | None) -> str:
    return "null" if value is None else f"{value:f}"


def _decimal(value: Decimal | None) -> str:
    return _number(None if value is None else f"{value:f}")


def _number(text: str | None) -> str:
    """A number from the text of a numeric."""
    if text is None or text in ("NaN", "Infinity", "-Infinity"):
        return "null"
    return text if "." in text else f"{text}.0"


def _json(text: str | None) -> str:
    if text is None:
        return "null"
    try:
        _CHECK.decode(text)
    except (ValueError, RecursionError) as error:
        raise RowRefused(f"a value of a json column is not JSON: {str(error)[:200]}") from error
    return text.replace("\n", " ").replace("\r", " ")  # which stand between values only; a document is one line


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")


_CHECK = json.JSONDecoder(parse_constant=_refuse, parse_int=len, parse_float=len)  # numbers stay text


def _value(value: Any) -> str:
    return as_json(_finite(value))


def _plain(value: object) -> object:
    """A value that JSON does not have."""
    if isinstance(value, datetime.date):  # datetimes are dates
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


as_json = json.JSONEncoder(default=_plain, ensure_ascii=False, allow_nan=False).encode  # quick with a text

_EXACT = Context(prec=MAX_PREC)


def _exact(text: str) -> Decimal:
    """A number of JSON, not rounded; of numbers that are equal the same one."""
    return Decimal(text).normalize(_EXACT)


def _integer_of(text: str) -> int | Decimal:
    """A whole number of JSON; Python makes no int of thousands of digits."""
    return int(text) if len(text) < 4000 else _exact(text)


def _normal(encode: Encode, value: Any) -> str:
    """The JSON of a value in one form. A value that no document can have has a form that no document has."""
    try:
        return _normal_json(json.loads(encode(value), parse_float=_exact, parse_int=_integer_of))
    except RowRefused:
        return "no document"


def _normal_json(value: Any) -> str:
    """A value of JSON, read with `_exact`, as a text: keys in order, and numbers that are equal alike."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{as_json(key)}:{_normal_json(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_normal_json, value)) + "]"
    if isinstance(value, int) and not isinstance(value, bool):
        value = _exact(str(value))
    return str(value) if isinstance(value, Decimal) else as_json(value)


# One encoder for each common type: asking json for one number after the other takes three times as long.
_ENCODERS: tuple[tuple[Callable[[pa.DataType], bool], Encode], ...] = (
    (pa.types.is_integer, _integer),
    (pa.types.is_boolean, {None: "null", False: "false", True: "true"}.__getitem__),
    (pa.types.is_floating, _float),
    (pa.types.is_string, as_json),
    (pa.types.is_date, _time),
    (pa.types.is_timestamp, _time),
)


MAX_BYTES = 5 << 20  # of one request; both products recommend some megabytes
_TIMEOUT = 60.0  # seconds for one request
_PATIENCE = 120.0  # seconds to wait for an index that is unreachable or too busy
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds between two tries; each pause doubles
_BUSY = (429, 502, 503, 504)
_OF_A_ROW = (400, 409, 413, 422)  # the content or size of a document is not accepted
_SEARCH_MOST = 10_000  # hits in one search; a limit of both products

_READ_BYTES = 16 << 20  # of one answer with documents, about, for `verify`; a longer document is an answer alone
_READ_IDS = 1_000  # documents in one answer at most
_SCROLL = "5m"  # how long the index keeps the state of a scan between two requests

OBJECT, AS_TEXT = "object", "text"
FIELDS = {"_shard": "replicad_shard", "_seq": "replicad_seq"}  # the index reserves names that begin with _

Line = tuple[bytes, bytes]  # action, document (empty for a delete)


def _now() -> float:
    """Seconds of a clock that goes on while the machine is suspended, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, slots=True)
class _Fresh:
    """How long rows may still be sent (see `_now`), and the highest number of a pod that their batch may have."""

    until: float
    last_pod: int | None

    def check(self, index: str) -> None:
        """Raise DownstreamUnavailable if the rows are too old: newer ones may have been written and deleted."""
        if _now() > self.until:
            raise DownstreamUnavailable(
                f"rows for index {index} were loaded more than {_FRESH:g} s ago and not sent: this process was paused, "
                "or the index is too busy; they are loaded again"
            )

    def check_later(self, index: str, document: object, version: int) -> None:
        """Raise DownstreamError if a later version of a document is of no pod that the query has read."""
        if self.last_pod is not None and version > self.last_pod:
            raise DownstreamError(
                f"index {index} has document {document} of pod {version}, and the batch ends at pod {self.last_pod}: "
                "another driver writes to the index, or the tube was made again or restored; write to a new index, "
                "with a backfill"
            )


class _TooLong(Exception):
    """An answer is longer than the bound of its request."""


@dataclass(slots=True)
class _Sent:
    """Documents that were deleted, and documents that the index has in a later version."""

    deleted: int = 0
    superseded: int = 0


def _version_of(done: dict[str, Any]) -> int | None:
    """The version that the index has, from the answer for a document; None if that is not the reason."""
    error = done.get("error")
    found = _VERSION.search(str(error.get("reason"))) if isinstance(error, dict) else None
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class BulkSink(Sink):
    """Keeps `index` at `url` (with user and password, or with `api_key`) in step.

    A document's id is made from `document_id`. It has the numeric fields `replicad_shard` and `replicad_seq` besides
    its columns; garbage is found by them. `json` is OBJECT or AS_TEXT (see `documents`).
    """

    url: str = field(repr=False)
    index: str
    api_key: str | None = field(default=None, repr=False)
    document_id: str = "{shard}:{id}"
    ca: str | None = None
    json: str = OBJECT
    patience: float = _PATIENCE

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError("downstream url: give one such as https://user:password@search.example.org:9200")
        if self.json not in (OBJECT, AS_TEXT):
            raise UsageError(f"downstream json: {self.json!r} is not valid; give one of {OBJECT}, {AS_TEXT}")
        try:
            self.document_id.format(shard=0, id=0)
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(f"document_id {self.document_id!r}: write it like {{shard}}:{{id}} ({error})") from None

    def check_columns(self, names: Sequence[str]) -> None:
        """A document cannot have the names of the index's metadata."""
        ours = [name for name in names if name in _METADATA or name in FIELDS.values()]
        if ours:
            raise UsageError(
                f"column {ours[0]!r}: documents of an index cannot have a field of that name; list the `columns` that "
                "you need without it, or rename it in a view"
            )

    def impatient(self, patience: float) -> Self:
        """See Sink."""
        return replace(self, patience=patience)

    def prepare(self, shape: Shape) -> None:
        """Check that the server can be reached and accepts our login. It creates the index with the first document."""
        self.check_columns(shape.schema.names)
        status, answer = self._request("GET", "/", None)
        if status >= 400:
            raise UsageError(f"{mask_secrets(self.url)} refuses us with status {status}: {_shortened(answer)}")

    def probe(self) -> None:
        """Ask the server who it is."""
        self._request("GET", "/", None)

    def identity(self) -> str | None:
        """The number of the index, which it gets with the first document; None if there is not exactly one."""
        found = self._checked("GET", f"/{quote(self.index, safe='')}/_settings", None, missing=True)
        numbers = [
            one.get("settings", {}).get("index", {}).get("uuid") for one in found.values() if isinstance(one, dict)
        ]
        return numbers[0] if len(numbers) == 1 else None

    def apply(self, shape: Shape, batch: BatchId, task: int, changes: Iterable[EnrichedRows]) -> Applied:  # noqa: ARG002
        """Write and delete documents, some megabytes at a time.

        Raises:
            RowRefused: the index does not take a document.
            DownstreamUnavailable: the index is away or too busy, or this process was paused.
            DownstreamError: the index has a document of a pod behind the batch.
        """
        written = deleted = 0
        before = _now()  # the next change is loaded after this moment
        for change in changes:
            fresh = _Fresh(before + _FRESH, batch.last_pod)
            written += change.writes.num_rows - self._send(self._puts(change.writes, shape), fresh).superseded
            deleted += self._send(self._deletes(change.deletes, shape.id), fresh).deleted
            before = _now()
        return Applied(written, deleted)

    def try_out(self, shape: Shape, changes: EnrichedRows) -> None:
        """Write them: documents that come again are the same."""
        self.apply(shape, BatchId("", 0), 0, [changes])

    def stale_ids(self, shape: Shape, shard: int, before: int, limit: int) -> pa.Array:
        """Ids of the shard with a `_seq` below `before`. Refreshes the index first, so that all writes are visible."""
        index = quote(self.index, safe="")
        self._checked("POST", f"/{index}/_refresh", None, missing=True)
        filters = [{"term": {FIELDS["_shard"]: shard}}, {"range": {FIELDS["_seq"]: {"lt": before}}}]
        body = {"size": min(limit, _SEARCH_MOST), "_source": [shape.id], "query": {"bool": {"filter": filters}}}
        answer = self._checked("POST", f"/{index}/_search", json.dumps(body).encode(), missing=True)
        hits = answer.get("hits", {}).get("hits", [])
        return pa.array([hit["_source"][shape.id] for hit in hits], shape.ids)

    def as_stored(self, shape: Shape, rows: pa.Table) -> pa.Table:
        """See Sink. The values become JSON in one form, in which numbers that are equal are equal texts."""
        columns = [rows.column(shape.id)]
        for column in rows.schema:
            if column.name != shape.id:
                encode = _encoder(
                    column, ColumnType.parse(shape.types.get(column.name, "")), objects=self.json == OBJECT
                )
                found = [_normal(encode, value) for value in rows.column(column.name).to_pylist()]
                columns.append(pa.array(found, pa.large_string()))
        names = [shape.id, *(name for name in rows.column_names if name != shape.id)]
        return pa.table(columns, names).select(rows.column_names)

    def rows(
        self,
        shape: Shape,
        shard: int | None,
        *,
        after: object = None,
        limit: int | None = None,
        ids: pa.Array | None = None,
    ) -> pa.Table:
        """See Sink. Documents are read by their ids, which needs no refresh."""
        assert shard is not None, "it has `stored_keys`"
        assert ids is not None, "it has `stored_keys`"
        del after, limit
        names = [name for name in shape.schema.names if name not in (shape.id, "_shard", "_seq")]
        found: list[tuple[Any, dict[str, Any]]] = []
        wanted, at, size = ids.to_pylist(), 0, _READ_IDS
        while at < len(wanted):
            piece = wanted[at : at + size]
            try:
                found += self._documents(shape, shard, piece, None if size == 1 else _READ_BYTES)
            except _TooLong:
                size = max(1, size // 8)
            else:
                at += len(piece)
        columns = [pa.array([id_ for id_, _ in found], shape.ids)]
        for name in names:
            columns.append(pa.array([_normal_json(one.get(name)) for _, one in found], pa.large_string()))
        return pa.table(columns, [shape.id, *names])

    def _documents(
        self, shape: Shape, shard: int, ids: list[Any], most: int | None
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The documents of these ids that the index has of this shard."""
        by_id = {self.document_id.format(shard=shard, id=id_): id_ for id_ in ids}
        body = as_json({"ids": list(by_id)}).encode()
        answer = self._checked("POST", f"/{quote(self.index, safe='')}/_mget", body, missing=True, most=most)
        for one in answer.get("docs", []):
            if one.get("error"):
                raise DownstreamError(f"index {self.index} does not return a document: {_shortened_json(one['error'])}")
            if not one.get("found"):
                continue
            document = one.get("_source")
            if document is None:
                raise UsageError(f"index {self.index} keeps no `_source`, so its documents cannot be compared")
            id_ = by_id[one["_id"]]
            if document.get(FIELDS["_shard"]) == shard and document.get(shape.id) == id_:
                yield id_, document

    def stored_keys(self, shape: Shape) -> Iterator[pa.Table]:
        """See Sink. A scan of the index (`scroll`), of documents with our fields."""
        index = quote(self.index, safe="")
        self._checked("POST", f"/{index}/_refresh", None, missing=True)
        body = {
            "size": _SEARCH_MOST,
            "_source": [shape.id, FIELDS["_shard"]],
            "query": {"exists": {"field": FIELDS["_shard"]}},
            "sort": ["_doc"],
        }
        path = f"/{index}/_search?scroll={_SCROLL}&allow_partial_search_results=false"
        answer = self._checked("POST", path, json.dumps(body).encode(), missing=True)
        while hits := answer.get("hits", {}).get("hits", []):
            if (failed := answer.get("_shards", {}).get("failed")) or answer.get("timed_out"):
                raise DownstreamUnavailable(
                    f"index {self.index} returned a part of its documents: {failed} shards failed"
                )
            keys = [(hit["_source"][FIELDS["_shard"]], hit["_source"][shape.id]) for hit in hits]
            yield pa.table(
                [pa.array([shard for shard, _ in keys], pa.int32()), pa.array([id_ for _, id_ in keys], shape.ids)],
                ["_shard", shape.id],
            )
            again = {"scroll": _SCROLL, "scroll_id": answer["_scroll_id"]}
            answer = self._checked("POST", "/_search/scroll", json.dumps(again).encode())

    def stored_counts(self) -> dict[int | None, int]:
        """See Sink."""
        index = quote(self.index, safe="")
        self._checked("POST", f"/{index}/_refresh", None, missing=True)
        terms = {"terms": {"field": FIELDS["_shard"], "size": _SEARCH_MOST}}
        body = json.dumps({"size": 0, "aggs": {"shards": terms}}).encode()
        answer = self._checked("POST", f"/{index}/_search", body, missing=True)
        found = answer.get("aggregations", {}).get("shards", {})
        if found.get("sum_other_doc_count"):
            raise DownstreamError(f"index {self.index} has documents of more than {_SEARCH_MOST:,} shards")
        return {int(one["key"]): int(one["doc_count"]) for one in found.get("buckets", [])}

    # --- documents ---

    def _puts(self, rows: pa.Table, shape: Shape) -> Iterator[Line]:
        shards, ids = rows.column("_shard").to_pylist(), rows.column(shape.id).to_pylist()
        seqs = rows.column("_seq").to_pylist()
        documents = documents_of(rows, shape.types, FIELDS, objects=self.json == OBJECT)
        action = self._action("index")
        for shard, id_, seq, document in zip(shards, ids, seqs, documents, strict=True):
            yield action(shard, id_, seq), document.encode()

    def _deletes(self, rows: pa.Table, id_: str) -> Iterator[Line]:
        action = self._action("delete")
        for row in rows.to_pylist():
            yield action(row["_shard"], row[id_], row["_seq"]), b""

    def _action(self, name: str) -> Callable[[int, int, int], bytes]:
        """Makes the line before a document from its shard, id and version."""
        begin = f'{{"{name}":{{"_index":{json.dumps(self.index)},"_id":'
        form = self.document_id.format
        end = '"version_type":"external_gte"}}'
        return lambda shard, id_, seq: f'{begin}{as_json(form(shard=shard, id=id_))},"version":{seq},{end}'.encode()

    def _send(self, lines: Iterable[Line], fresh: _Fresh) -> _Sent:
        """Send lines in requests of bounded size."""
        sent, size = _Sent(), 0
        held: list[Line] = []
        for line in lines:
            held.append(line)
            size += len(line[0]) + len(line[1]) + 2
            if size >= MAX_BYTES:
                self._bulk(held, fresh, sent)
                held, size = [], 0
        if held:
            self._bulk(held, fresh, sent)
        return sent

    def _bulk(self, lines: list[Line], fresh: _Fresh, sent: _Sent) -> None:
        retries = Retries(_FIRST_PAUSE, _LONGEST_PAUSE, patience=self.patience)
        while lines:
            body = b"".join(part + b"\n" for line in lines for part in line if part)
            fresh.check(self.index)
            items = self._checked("POST", "/_bulk", body)["items"]
            again: list[Line] = []
            for line, item in zip(lines, items, strict=True):
                ((action, done),) = item.items()
                sent.deleted += action == "delete" and done["status"] == 200
                if done["status"] in _BUSY:
                    again.append(line)
                elif done["status"] == _CONFLICT and (later := _version_of(done)) is not None:
                    fresh.check_later(self.index, done.get("_id"), later)
                    sent.superseded += 1
                elif done["status"] >= 300 and not (action == "delete" and done["status"] == 404):
                    reason = json.dumps(done.get("error"))[:500]
                    kind = RowRefused if done["status"] in _OF_A_ROW else DownstreamError
                    raise kind(f"index {self.index} refuses document {done.get('_id')}: {reason}")
            if again and not retries.pause():
                raise DownstreamUnavailable(f"index {self.index} stays too busy for {len(again)} documents")
            lines = again

    # --- requests ---

    def _checked(
        self, method: str, path: str, body: bytes | None, *, missing: bool = False, most: int | None = None
    ) -> dict[str, Any]:
        """A request that must succeed. `missing`: the answer is empty if the index does not exist yet.

        `most`: bytes of the answer; of a longer one _TooLong is raised.
        """
        retries = Retries(_FIRST_PAUSE, _LONGEST_PAUSE, patience=self.patience)
        while True:
            try:
                status, answer = self._request(method, path, body, most)
            except DownstreamError:
                if not retries.pause():
                    raise
            else:
                if status < 300:
                    found: dict[str, Any] = json.loads(answer, parse_float=_exact, parse_int=_integer_of)
                    return found
                if status == 404 and missing:
                    return {}
                if status not in _BUSY or not retries.pause():
                    bulk = path == "/_bulk"
                    kind = (
                        DownstreamUnavailable
                        if status in _BUSY
                        else RowRefused
                        if bulk and status in _OF_A_ROW
                        else DownstreamError
                    )
                    raise kind(f"{method} {path} ended with status {status}: {_shortened(answer)}")

    def _request(self, method: str, path: str, body: bytes | None, most: int | None = None) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        connection = _connection(
            (os.getpid(), threading.get_ident()), parts.scheme, parts.hostname or "", parts.port, self.ca
        )
        headers = {"Content-Type": "application/x-ndjson" if path == "/_bulk" else "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"ApiKey {self.api_key}"
        elif parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = "Basic " + base64.b64encode(secret.encode()).decode()
        try:
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            text = answer.read(None if most is None else most + 1)
            if most is not None and len(text) <= most:
                answer.read()  # its end
        except (OSError, http.client.HTTPException) as error:
            connection.close()  # the next request opens it again
            raise DownstreamUnavailable(f"no answer from {mask_secrets(self.url)}: {error}") from error
        if most is not None and len(text) > most:
            connection.close()  # the rest is still on its way
            raise _TooLong
        return answer.status, text


@functools.lru_cache(maxsize=16)
def _connection(
    owner: tuple[int, int], scheme: str, host: str, port: int | None, ca: str | None
) -> http.client.HTTPConnection:
    """One connection per owner (process and thread) and server."""
    del owner
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
    return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT, context=ssl.create_default_context(cafile=ca))


def _shortened(answer: bytes) -> str:
    return " ".join(answer[:500].decode("utf-8", "replace").split())


def _shortened_json(value: object) -> str:
    return json.dumps(value, default=str)[:500]
