"""A search index in memory, in the form of Elasticsearch and OpenSearch, as strict as they are; and it can misbehave.

Of their manuals: "Bulk API" (one line for each action and document, a newline at the end, the content type, an answer
for each action; external versions, and `index.gc_deletes`, after which the version of a deleted document is
forgotten), "Dynamic mapping" (the first value of a field gives its type, and others must fit), "Near real-time
search" (what was written is found after a refresh), `index.max_result_window`, "Multi get API" (reads what was written,
without a refresh), "Scroll API" (a state that is kept between requests), "Terms aggregation".
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class IndexServer:
    """`documents` by id. `busy`: so many documents are refused with 429 first; `away`: so many requests get a 503."""

    def __init__(self, authorization: str | None = None) -> None:
        self.documents: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, int] = {}  # by id, of deleted documents too
        self.searchable: dict[str, dict[str, Any]] = {}  # as of the last refresh
        self.mapping: dict[str, str] = {}  # the type of each field, `a.b` for b in the object a
        self.cut: list[str] = []  # fields of whole numbers that got another number, of which they index a part
        self.uuid = "first"  # of the index
        self.authorization = authorization
        self.busy = self.away = 0
        self.refuse: str | None = None  # the id of a document that does not fit
        self.requests: list[str] = []
        self.page = 100  # documents in an answer of a scan
        self.scrolls: dict[str, list[dict[str, Any]]] = {}  # what is left of scans, by their ids
        self.shards_failed = 0  # of a scan
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if not self.path.endswith("/_settings"):
                    self.reply(200, {"version": {"number": "8.0"}})
                elif outer.documents:
                    self.reply(200, {self.path.split("/")[1]: {"settings": {"index": {"uuid": outer.uuid}}}})
                else:
                    self.reply(404, {"error": "no such index"})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with outer.lock:
                    self.reply(*outer.answer(self.path, self.headers.get("Content-Type", ""), body))

            def reply(self, status: int, answer: dict[str, Any]) -> None:
                if outer.authorization not in (None, self.headers.get("Authorization")):
                    status, answer = 401, {"error": "who are you?"}
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port: int = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str, content: str, body: bytes) -> tuple[int, dict[str, Any]]:
        self.requests.append(path)
        if self.away:
            self.away -= 1
            return 503, {}
        wanted = "application/x-ndjson" if path == "/_bulk" else "application/json"
        if content != wanted:
            return 406, {"error": f"Content-Type header [{content}] is not supported"}
        if path == "/_bulk":
            return self.bulk(body)
        if path == "/_search/scroll":
            asked = json.loads(body)
            return self.scroll(asked["scroll_id"])
        if not self.documents and not self.versions:
            return 404, {"error": {"type": "index_not_found_exception"}}
        if path.endswith("/_refresh"):
            self.searchable = dict(self.documents)
            return 200, {}
        if path.endswith("/_mget"):
            docs = [{"_id": id_, **self.got(id_)} for id_ in json.loads(body)["ids"]]
            return 200, {"docs": docs}
        path, _, parameters = path.partition("?")
        if parameters:
            assert parameters.startswith("scroll=")
            return self.begin_scroll(json.loads(body))
        return self.search(json.loads(body))

    def got(self, id_: str) -> dict[str, Any]:
        document = self.documents.get(id_)
        return {"found": False} if document is None else {"found": True, "_source": document}

    def begin_scroll(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if asked["size"] > 10_000:
            return 400, {"error": "Batch size is too large"}
        field = asked["query"]["exists"]["field"]
        names = asked["_source"]
        found = [{"_source": {name: one[name] for name in names}} for one in self.searchable.values() if field in one]
        number = f"scroll {len(self.scrolls)}"
        self.scrolls[number] = found
        return self.scroll(number)

    def scroll(self, number: str) -> tuple[int, dict[str, Any]]:
        if number not in self.scrolls:
            return 404, {"error": {"type": "search_context_missing_exception"}}
        page, self.scrolls[number] = self.scrolls[number][: self.page], self.scrolls[number][self.page :]
        return 200, {"_scroll_id": number, "_shards": {"failed": self.shards_failed}, "hits": {"hits": page}}

    def bulk(self, body: bytes) -> tuple[int, dict[str, Any]]:
        if not body.endswith(b"\n"):
            return 400, {"error": "The bulk request must be terminated by a newline [\\n]"}
        lines = body[:-1].split(b"\n")
        items: list[dict[str, Any]] = []
        while lines:
            action = _read(lines.pop(0))
            ((name, where),) = action.items()
            keys = {"_index", "_id", "version", "version_type"}
            if name not in ("index", "delete") or where.keys() != keys or not where["_id"]:
                return 400, {"error": f"Malformed action/metadata line: {action}"}
            items.append({name: {**where, **self.act(name, where["_id"], where["version"], lines)}})
        failed = any(done["status"] >= 300 for item in items for done in item.values())
        return 200, {"took": 1, "errors": failed, "items": items}

    def forget_deleted(self) -> None:
        """What happens `index.gc_deletes` after a delete."""
        self.versions = {id_: version for id_, version in self.versions.items() if id_ in self.documents}

    def act(self, name: str, id_: str, version: int, lines: list[bytes]) -> dict[str, Any]:
        text = lines.pop(0) if name == "index" else b""
        if self.busy:
            self.busy -= 1
            return {"status": 429, "error": {"type": "es_rejected_execution_exception"}}
        if (known := self.versions.get(id_, 0)) > version:
            reason = f"[{id_}]: version conflict, current version [{known}] is higher than the one provided [{version}]"
            return {"status": 409, "error": {"type": "version_conflict_engine_exception", "reason": reason}}
        if name == "delete":
            self.versions[id_] = version
            there = self.documents.pop(id_, None) is not None
            return {"status": 200 if there else 404, "result": "deleted" if there else "not_found"}
        try:
            if id_ == self.refuse:
                raise ValueError("it does not fit")
            document = _read(text)
            self.map("", document)
        except (ValueError, RecursionError) as error:
            return {"status": 400, "error": {"type": "mapper_parsing_exception", "reason": str(error)}}
        created = id_ not in self.documents
        self.documents[id_], self.versions[id_] = document, version
        return {"status": 201 if created else 200, "result": "created" if created else "updated"}

    def map(self, path: str, value: Any) -> None:
        """Find out the type of a value's field, or whether the value fits."""
        if isinstance(value, list):
            for one in value:
                self.map(path, one)
        elif value is not None:
            kind = _kind(value)
            known = self.mapping.setdefault(path, kind)
            if "object" in (kind, known) and kind != known:
                raise ValueError(f"object mapping for [{path}] and a concrete value")
            if not _fits(value, kind, known):
                raise ValueError(f"failed to parse field [{path}] of type [{known}]: {value!r}")
            if known == "long" and kind == "float":
                self.cut.append(path)
            for key, one in value.items() if kind == "object" else ():
                if not key:
                    raise ValueError("field name cannot be an empty string")
                self.map(f"{path}.{key}", one)

    def search(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if asked["size"] > 10_000:
            return 400, {"error": "Result window is too large"}
        if "aggs" in asked:
            field = asked["aggs"]["shards"]["terms"]["field"]
            counts = Counter(one[field] for one in self.searchable.values() if field in one)
            buckets = [{"key": key, "doc_count": count} for key, count in counts.items()]
            return 200, {"aggregations": {"shards": {"sum_other_doc_count": 0, "buckets": buckets}}}
        term, bounds = (clause for clause in asked["query"]["bool"]["filter"])
        ((shard_field, shard),), ((seq_field, below),) = term["term"].items(), bounds["range"].items()
        found = [d for d in self.searchable.values() if d[shard_field] == shard and d[seq_field] < below["lt"]]
        hits = [{"_source": {name: one[name] for name in asked["_source"]}} for one in found[: asked["size"]]]
        return 200, {"hits": {"hits": hits}}


def _read(line: bytes) -> dict[str, Any]:
    found = json.loads(line, parse_constant=_refuse, object_pairs_hook=_once)
    if not isinstance(found, dict):
        raise ValueError("a document is an object")  # noqa: TRY004 - as other bad documents
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("Duplicate field")
    return dict(pairs)


def _kind(value: Any) -> str:
    """The type that a value gives to a new field."""
    if isinstance(value, str):
        return "date" if re.fullmatch(r"\d{4}-\d\d-\d\d(T[\d:.]+(Z|[+-]\d\d:\d\d)?)?", value) else "text"
    kinds: dict[type, str] = {bool: "boolean", int: "long", float: "float", dict: "object"}
    return kinds[type(value)]


def _fits(value: Any, kind: str, known: str) -> bool:
    if known == "long":
        return kind in ("long", "float") and -(1 << 63) <= value < 1 << 63
    return known in ("text", kind) or (known == "float" and kind == "long")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
