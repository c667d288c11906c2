"""The demonstration of streams of changes in browsers: each page has the orders of its customer, and no others.

The pages are served by this program, which also gives each of them a token that is bound to its customer, as a program
does after a login. The pages follow the daemon by themselves, through its restarts.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import trio

from replicad.config.browser_tokens import Claims, sign
from replicad.demo.run import Demo, running_daemon, until_interrupted
from replicad.postgres import schema
from replicad.postgres.bridge import Database, load_sql

CUSTOMERS = (42, 43)
LIFE = 600.0  # seconds that a token is valid for; the page gets the next one
PAUSE = 0.5  # seconds between two changes
RESTARTS = 30  # changes between two restarts of the daemon

PAGE = """\
<!doctype html>
<meta charset="utf-8">
<title>Orders of customer {customer}</title>
<style>body {{ font: 16px sans-serif; margin: 2em }} td, th {{ padding: 0 1em; text-align: left }}</style>
<h1>Orders of customer {customer}</h1>
<p id="state">connecting</p>
<table><thead><tr><th>order<th>customer<th>item<th>state</thead><tbody id="orders"></tbody></table>
<script>
"use strict"
const daemon = {daemon}, customer = {value}, orders = new Map()
let last = "EARLIEST"

function show(state) {{
    document.getElementById("state").textContent = state
    const lines = [...orders.values()].sort((one, other) => one.id - other.id).map(order => {{
        const line = document.createElement("tr")
        for (const value of [order.id, order.customer_id, order.item, order.state])
            line.insertCell().textContent = value
        return line
    }})
    document.getElementById("orders").replaceChildren(...lines)
}}

function take(event) {{
    const {{op, key, row}} = JSON.parse(event.data).row
    last = event.lastEventId || last
    if (op === "t") orders.clear()
    else if (op === "d") orders.delete(key)
    else orders.set(key, row)
    show("connected")
}}

async function follow() {{
    let token
    try {{
        token = await (await fetch(`/token/${{customer}}`)).text()
    }} catch {{
        return setTimeout(follow, 500)
    }}
    const source = new EventSource(
        `${{daemon}}/streams/orders/live?after=${{encodeURIComponent(last)}}&access_token=${{token}}`)
    for (const name of ["insert", "update", "delete", "read", "truncate"]) source.addEventListener(name, take)
    source.addEventListener("position", event => {{ last = event.lastEventId || last }})
    function again() {{
        source.close()
        setTimeout(follow, 500)
    }}
    source.addEventListener("refused", again)  // the token has expired
    source.addEventListener("reset", () => {{ orders.clear(); last = "EARLIEST"; again() }})
    source.onopen = () => show("connected")
    source.onerror = () => {{ show("connecting"); if (source.readyState === EventSource.CLOSED) again() }}
}}
follow()
</script>
"""


def page_of(customer: int, daemon: str) -> str:
    """The page of a customer. `daemon`: the URL of its port for HTTP."""
    place = json.dumps(daemon).replace("<", "\\u003c")
    return PAGE.format(customer=escape(str(customer)), value=json.dumps(str(customer)), daemon=place)


@contextmanager
def serving_pages(daemon: str, key: Path, port: int = 0) -> Iterator[int]:
    """Serve /CUSTOMER, a page, and /token/CUSTOMER, a token for it, on a port of the loopback; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path.strip("/")
            customer = next((one for one in CUSTOMERS if path in (str(one), f"token/{one}")), None)
            if customer is None:
                self.send_error(404, f"there are {' and '.join(f'/{one}' for one in CUSTOMERS)}")
                return
            if path.startswith("token/"):
                part = ("customer_id", str(customer))
                text, kind = (
                    sign(Claims(f"customer-{customer}", ("orders",), time.time() + LIFE, part=part), key),
                    "plain",
                )
            else:
                text, kind = page_of(customer, daemon), "html"
            body = text.encode()
            self.send_response(200)
            self.send_header("content-type", f"text/{kind}; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.send_header("cache-control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """The demonstration shows what it does itself."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def make_secret(file: Path) -> Path:
    """A file with a new secret that only its owner can read."""
    file.unlink(missing_ok=True)
    file.touch(0o600)
    file.write_text(f"{secrets.token_hex(32)}\n", encoding="ascii")
    return file


class WebDemo(Demo):
    """One run in `folder`, until it is interrupted."""

    async def run(self) -> bool:
        """Run the demonstration.

        Raises:
            EnvironmentRefused: something is missing or did not start.
            KeyboardInterrupt: on SIGINT, SIGTERM or SIGHUP, after all processes have ended.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        async with until_interrupted(), AsyncExitStack() as stack:
            db = await self._database(stack)
            self.show.step("Making a table of orders, and the stream of its changes")
            for part in reversed(schema.PARTS):  # remove what an earlier run has left
                await schema.uninstall(db, part)
            await schema.install(db, "stream")  # no daemon runs yet
            await db.execute(load_sql("demo_shop"))
            options = ("--changes", "--filter", "customer_id", "--snapshot")
            await self._command("streams", "add", "orders", "--table", "public.orders", *options)
            key, token = make_secret(self.folder / "browser.key"), make_secret(self.folder / "daemon.token")
            place = f"127.0.0.1:{_free_port()}"
            pages = stack.enter_context(serving_pages(f"http://{place}", key))
            serve = ["--http", place, "--http-origins", f"http://127.0.0.1:{pages}"]
            serve += ["--token-file", str(token), "--browser-key", str(key)]
            self.show.step("Serving; open each address in a browser, and end with Ctrl-C")
            for customer in CUSTOMERS:
                self.show.line(f"http://127.0.0.1:{pages}/{customer}")
            while True:
                async with running_daemon(self.url, self.folder, *serve):
                    self.show.line("The daemon serves")
                    for _ in range(RESTARTS):
                        await change_orders(db)
                        await trio.sleep(PAUSE)
                self.show.line("The daemon has ended; the pages wait for the next one")
                await change_orders(db)


async def change_orders(db: Database) -> None:
    """Insert, change, move and delete some orders."""
    await db.execute(load_sql("demo_shop_change"))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
