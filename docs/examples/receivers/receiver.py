"""A receiver of webhooks of `replicad sender --sign standard`, in Python and with the library `standardwebhooks`.

    pip install standardwebhooks
    WEBHOOK_SECRET=whsec_... python receiver.py 8080

A server of the standard library stands for your framework. Each request is answered only after its events are handled:
2xx means that the sender need not send them again.
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from standardwebhooks import Webhook, WebhookVerificationError

MOST = 8 << 20  # bytes of a request; the sender's --transaction-bytes is 4 MiB
REMEMBERED = 10_000  # ids of requests that were accepted

webhook = Webhook(os.environ["WEBHOOK_SECRET"])
seen: OrderedDict[str, None] = OrderedDict()  # a real receiver keeps the ids where it keeps the effect of the events
turn = Lock()


class Receiver(BaseHTTPRequestHandler):
    """One endpoint."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", "0"))
        if length > MOST:
            self.answer(413)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        try:
            webhook.verify(body, dict(self.headers))  # the signature, and that it is at most 5 minutes old
        except WebhookVerificationError:
            self.answer(401)
            return
        with turn:
            name = self.headers["webhook-id"]
            if name not in seen:  # a repeated request has the same id
                for event in events(json.loads(body)):
                    print(json.dumps(event), flush=True)
                seen[name] = None
                while len(seen) > REMEMBERED:
                    seen.popitem(last=False)
        self.answer(204)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing: the prints above are the log."""


def events(body: object) -> list[object]:
    """The facts and updates of `--form webhook`, or the data of CloudEvents."""
    if isinstance(body, dict) and "specversion" not in body:
        return [*body["facts"], *body["updates"]]
    return [event["data"] for event in (body if isinstance(body, list) else [body])]


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
