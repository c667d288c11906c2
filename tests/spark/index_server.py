"""A search index in memory that answers what the bulk downstream asks, in the form of Elasticsearch;
and can misbehave.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class IndexServer:
    """`documents` by id. `busy`: so many documents are refused with 429 first; `away`: so many requests get a 503."""

    def __init__(self, authorization: str | None = None) -> None:
        self.documents: dict[str, dict[str, Any]] = {}
        self.uuid = "first"  # of the index
        self.authorization = authorization
        self.busy = self.away = 0
        self.refuse: str | None = None  # the id of a document that does not fit
        self.requests: list[str] = []
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
                    self.reply(*outer.answer(self.path, body))

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

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        self.requests.append(path)
        if self.away:
            self.away -= 1
            return 503, {}
        if path == "/_bulk":
            return 200, self.bulk(body)
        if path.endswith("/_search"):
            return 200, self.search(json.loads(body))
        return (200, {}) if self.documents else (404, {})

    def bulk(self, body: bytes) -> dict[str, Any]:
        lines = [json.loads(line, parse_constant=_refuse) for line in body.decode().splitlines()]
        items = []
        while lines:
            ((action, where),) = lines.pop(0).items()
            document = lines.pop(0) if action == "index" else None
            done = {"_id": where["_id"], "status": 200}
            if self.busy:
                self.busy -= 1
                done["status"] = 429
            elif where["_id"] == self.refuse:
                done.update(status=400, error={"type": "mapper_parsing_exception"})
            elif document is not None:
                self.documents[where["_id"]] = document
            elif self.documents.pop(where["_id"], None) is None:
                done["status"] = 404
            items.append({action: done})
        return {"items": items}

    def search(self, asked: dict[str, Any]) -> dict[str, Any]:
        term, bounds = (clause for clause in asked["query"]["bool"]["filter"])
        ((shard_field, shard),), ((seq_field, below),) = term["term"].items(), bounds["range"].items()
        found = [d for d in self.documents.values() if d[shard_field] == shard and d[seq_field] < below["lt"]]
        return {"hits": {"hits": [{"_source": document} for document in found[: asked["size"]]]}}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
