"""`replicad sender` from nothing: a Postgres, a daemon, a destination that is down at first, and five orders.

    pip install 'replicad[embedded,federation]'
    python sender.py

Prints what the destination is sent, with the transaction's id, and ends when it has everything.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from replicad import embedded_postgres
from replicad.postgres.programs import find_programs

ORDERS = 5
received: list[int] = []


class Shop(BaseHTTPRequestHandler):
    """The destination. Its first answer is 503: it is down; the sender comes again by itself."""

    tries = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Shop.tries += 1
        self.send_response(503 if Shop.tries == 1 else 200)
        self.send_header("content-length", "0")
        self.end_headers()
        if Shop.tries > 1:
            print(self.headers["replicad-transaction"], body["facts"])
            received.extend(order["id"] for order in body["facts"])

    def log_message(self, *_: object) -> None:
        """Nothing: the prints above are the log."""


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(embedded_postgres(None))
        psql(url, "CREATE TABLE orders (id bigserial PRIMARY KEY, item text)")

        shop = ThreadingHTTPServer(("127.0.0.1", 0), Shop)
        Thread(target=shop.serve_forever, daemon=True).start()

        ready = folder / "ready"
        start(stack, "serve", "--database", url, "--listen", "127.0.0.1:0", "--ready-file", str(ready))
        while not ready.exists():
            time.sleep(0.05)
        server = ready.read_text().strip()
        run("streams", "add", "orders", "--table", "public.orders", "--id", "id", "--database", url)

        start(
            stack, "sender", "--facts", "orders", "--start", "earliest", "--retry-first", "200ms",
            "--destinations", f"http://127.0.0.1:{shop.server_port}/orders", "--allow-private", "127.0.0.1",
            "--server", server, "--database", url,
        )  # fmt: skip
        for number in range(ORDERS):
            psql(url, f"INSERT INTO orders (item) VALUES ('item {number}')")
        while len(received) < ORDERS:
            time.sleep(0.05)
        assert received == list(range(1, ORDERS + 1)), received
        print("all there, in order")


def psql(url: str, sql: str) -> None:
    subprocess.run([str(find_programs() / "psql"), "-qX", "-d", url, "-c", sql], check=True)


def run(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "replicad", *words], check=True)


def start(stack: ExitStack, *words: str) -> None:
    """A replicad process that ends with the example."""
    process = subprocess.Popen([sys.executable, "-m", "replicad", *words, "--log-level", "warning"])
    stack.callback(process.wait)
    stack.callback(process.terminate)


if __name__ == "__main__":
    main()
