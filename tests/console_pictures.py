"""The pictures of the console in docs/images/: a daemon with the console's scene, in a real Chromium. Make them anew:

    python -m tests.console_pictures

It needs Chromium (`apt install chromium`), so `make docs` leaves it out.
"""

from __future__ import annotations

import io
import os
import secrets
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import trio
from PIL import Image

from replicad.config.settings import Address, ServerSettings
from replicad.postgres.bridge import open_database
from replicad.postgres.embedded import EmbeddedPostgres
from tests import browser
from tests.conftest import install, psql
from tests.console_scene import PACES, clients, set_up
from tests.daemons import open_daemon
from tests.roles import DAEMON, ROLES, as_daemon

FOLDER = Path(__file__).parents[1] / "docs/images"
COLOURS = 64  # of a picture: enough for text, and a quarter of the bytes
REFUSAL = "status 422: no such region"


def take(url: str) -> None:
    """Take the pictures."""
    FOLDER.mkdir(exist_ok=True)
    wide, phone = {"width": 1100, "height": 800}, {"width": 390, "height": 844}
    with browser.open_browser() as chromium:
        for name, size, scheme in (("console", wide, "light"), ("console-phone", phone, "dark")):
            page = chromium.new_context(viewport=size, color_scheme=scheme).new_page()  # type: ignore[arg-type]
            page.goto(f"{url}/console")
            page.get_by_role("button", name="Show 3 parked").click()
            page.get_by_label("Replay 1", exact=True).check()
            page.get_by_text("SELECT pg_terminate_backend").first.wait_for()
            page.locator("#facts").get_by_text("connected to this database").wait_for()
            save(name, page.screenshot(full_page=size is wide))


def save(name: str, png: bytes) -> None:
    """Write a picture with few colours."""
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(FOLDER / f"{name}.png", optimize=True)


async def main(url: str) -> None:
    """Run a daemon on the server, with everything that the pictures show."""
    settings = ServerSettings(listen=Address("127.0.0.1", 0), http=Address("127.0.0.1", 0), server_name="db1.example")
    async with open_database(url, size=3, application_name="app") as db:
        await set_up(db, error=REFUSAL)
        async with open_daemon(settings, url, paces=PACES) as daemon, clients(daemon):
            async with db.connection() as writer, writer.transaction():
                await writer.execute("INSERT INTO orders (body) VALUES ('x')")
                await db.execute("INSERT INTO orders (body) SELECT 'x' FROM generate_series(1, 24)")
                await trio.to_thread.run_sync(take, f"http://{daemon.http}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="replicad-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # the server of root runs as another user
        with socket.create_server(("127.0.0.1", 0)) as door:
            port = door.getsockname()[1]
        # Over TCP, as usual: the folder of a socket would be a path of the machine that took the pictures.
        settings = {"fsync": "off", "listen_addresses": "127.0.0.1", "port": str(port)}
        with EmbeddedPostgres(Path(folder) / "data", settings) as postgres:
            psql(postgres.url, "CREATE DATABASE app")
            app = urlsplit(postgres.url)._replace(path="/app").geturl()
            psql(app, ROLES)
            os.environ["PGPASSWORD"] = secrets.token_hex(8)
            for role in ("postgres", DAEMON):
                psql(app, f"ALTER ROLE {role} PASSWORD '{os.environ['PGPASSWORD']}'")
            install(as_daemon(app), "stream", "tube", "federation")
            trio.run(main, f"postgresql://postgres@127.0.0.1:{port}/app")
