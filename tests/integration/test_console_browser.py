"""The console in a real Chromium: live, by keyboard, on a phone, in the dark, and with names that are HTML."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from replicad.config.settings import ServerSettings
from replicad.postgres.bridge import Database
from tests import browser
from tests.conftest import PATIENCE
from tests.console_scene import ERROR, HOSTILE, PACES, clients, set_up
from tests.daemons import Daemon

from .test_http import ANY_PORT, SECRET

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
MILLISECONDS = PATIENCE * 1000
pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "there is a browser")


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name="example.com")


KEEP = """async () => {
    const { keep, put } = await import("/console-nodes.js");
    const parent = document.createElement("ul");
    return [["a", "b", "a"], ["b", "a", "a"], ["c"]].map((items) => {
        keep(parent, items, (item) => item, () => document.createElement("li"), put);
        return [...parent.children].map((child) => child.textContent).join();
    });
}"""


class Visit:
    """A page of the console, and everything that went wrong in it."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        from playwright.sync_api import expect

        self.faults: list[str] = []
        self.hosts: set[str] = set()
        expect.set_options(timeout=MILLISECONDS)
        context.set_default_timeout(MILLISECONDS)
        self.page: Page = context.new_page()
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        self.page.goto(f"{url}/console")

    def _note(self, kind: str, text: str) -> None:
        if kind == "error" and "401" not in text:
            self.faults.append(text)

    def rows(self, place: str) -> list[str]:
        """The rows of a table as a person reads them."""
        return [" ".join(one.split()) for one in self.page.locator(f"{place} tbody tr").all_inner_texts()]

    def tab_to(self, label: str) -> None:
        """Press Tab until the element with this text or label has the focus."""
        for _ in range(60):
            self.page.keyboard.press("Tab")
            found = self.page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent")
            if found == label:
                return
        raise AssertionError(f"Tab does not come to {label!r}")


@asynccontextmanager
async def visited(daemon: Daemon, look: Callable[[Visit], None], **options: Any) -> AsyncIterator[None]:
    """Runs `look` in a thread, beside the block."""

    def run() -> None:
        with browser.open_browser() as chromium:
            visit = Visit(chromium.new_context(**options), f"http://{daemon.http}")
            look(visit)
            assert visit.faults == []
            assert visit.hosts == {str(daemon.http)}, "it needs no other host"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, run)
        yield


async def test_the_console_is_live_and_shows_who_holds_back_and_hostile_texts_as_texts(
    start_daemon: Start, database: Database
) -> None:
    await set_up(database, stream=HOSTILE)
    await database.execute("SELECT setval('events_id_seq', 9007199254740993)")  # no number of JavaScript
    seen, ended = trio.Event(), trio.Event()
    pid: list[int] = []

    def look(visit: Visit) -> None:
        from playwright.sync_api import expect

        page = visit.page
        statement = page.locator("#stream-list code").first
        statement.wait_for()
        assert statement.inner_text() == f"SELECT pg_terminate_backend({pid[0]})"
        page.locator("#stream-list button").first.click()
        page.get_by_role("button", name="Copied").or_(page.get_by_role("button", name="Selected")).wait_for()
        page.locator("#client-list").get_by_text(HOSTILE).first.wait_for()
        page.locator("#tube-list").get_by_text("worker-1").first.wait_for()
        assert any(row.startswith(HOSTILE) and " ok " in f" {row} " for row in visit.rows("#stream-list"))
        assert "9,007,199,254,740,993" in page.locator("#stream-list").inner_text()
        assert "41,000 of about 100,000 ids" in page.locator("#tube-list").inner_text()
        assert "trouble_began" in visit.rows("#event-list")[1]
        killed, own = page.locator("#daemon-list tbody tr").all_inner_texts()
        assert re.match(r"db2\.example\s+silent for \d+ s\s+4711\s+10\.1\.0\.3:9009\s", killed)
        assert re.match(rf"example\.com \(this one\)\s+alive\s+{os.getpid()}\s", own)
        page.evaluate("document.body.dataset.mark = 'the same page'")
        trio.from_thread.run_sync(seen.set)
        expect(page.locator("#stream-list code")).to_have_count(0)
        page.get_by_role("button", name="Show 3 parked").click()
        page.get_by_text(ERROR).first.wait_for()
        assert page.evaluate("document.body.dataset.mark") == "the same page"
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert page.title() == "example.com - replicad"
        assert page.evaluate(KEEP) == ["a,b,a", "b,a,a", "c"], "also where two items have one key"
        page.locator("#filter").fill("no such name")
        page.locator("#stream-list").get_by_text("There are no streams").wait_for()
        trio.from_thread.run_sync(ended.set)

    async with start_daemon(PACES) as daemon, clients(daemon, stream=HOSTILE, name=HOSTILE):
        async with database.connection() as writer:
            async with writer.transaction():
                await writer.execute("INSERT INTO orders (body) VALUES ('x')")
                pid.append(await writer.fetch_value("SELECT pg_backend_pid()"))
                async with visited(daemon, look):
                    await seen.wait()
                    await writer.execute("COMMIT; BEGIN")
        assert ended.is_set()


async def test_parked_ids_are_replayed_with_the_keyboard_alone_on_a_phone_in_the_dark(
    start_daemon: Start, database: Database
) -> None:
    await set_up(database)

    def look(visit: Visit) -> None:
        from playwright.sync_api import expect

        page, press = visit.page, visit.page.keyboard.press
        page.get_by_role("button", name="Show 3 parked").wait_for()
        visit.tab_to("Show 3 parked")
        press("Enter")
        page.get_by_label("Choose 1", exact=True).wait_for()
        visit.tab_to("Choose 1")
        press("Space")
        visit.tab_to("Replay what is ticked")
        press("Enter")
        page.get_by_role("dialog").wait_for()
        assert "Put 1 parked entry back into tube cities?" in page.get_by_role("dialog").inner_text()
        assert page.evaluate("document.activeElement.textContent") == "Leave it", "Enter by mistake changes nothing"
        visit.tab_to("Replay")
        press("Enter")
        page.get_by_text("1 put back").wait_for()
        expect(page.locator(".entries tbody tr")).to_have_count(2)
        for button, question, sure, said in (
            ("Pause", "workers get no pods", "Pause it", "paused"),
            ("Resume", "Workers get its pods again", "Resume it", "resumed"),
        ):
            page.get_by_role("button", name=button, exact=True).wait_for()
            visit.tab_to(button)
            press("Enter")
            page.get_by_role("dialog").wait_for()
            assert question in page.get_by_role("dialog").inner_text()
            visit.tab_to(sure)
            press("Enter")
            page.locator(".result").get_by_text(said, exact=True).wait_for()
        assert "of public.cities" in page.locator("#tube-list h3").first.inner_text()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the phone"
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)")
        assert max(dark) < 64

    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "has_touch": True, "is_mobile": True}
    async with start_daemon() as daemon, clients(daemon):
        async with visited(daemon, look, **phone):
            pass
        assert await database.fetch_value("SELECT count(*) FROM tube.tube_parked") == 2
        assert await database.fetch_value("SELECT count(*) FROM tube.cities WHERE ids = '{2988508}'") == 1


async def test_a_secret_is_asked_for_and_a_wrong_one_is_said_to_be_wrong(
    start_daemon: Start, database: Database
) -> None:
    def look(visit: Visit) -> None:
        page = visit.page
        page.get_by_label("The daemon wants a secret").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_role("alert").filter(has_text="the token is wrong").wait_for()
        assert page.locator("#main").is_hidden()
        page.get_by_label("The daemon wants a secret").fill(SECRET)
        page.get_by_role("button", name="Go on").click()
        page.get_by_role("heading", name="Streams").wait_for()
        assert page.locator("#state").inner_text() == "ready"
        page.reload()
        page.get_by_role("heading", name="Streams").wait_for()

    async with start_daemon(token=SECRET) as daemon, visited(daemon, look):
        pass


TRIES = """async () => {
    const broken = new Set(), thrown = [];
    document.addEventListener("securitypolicyviolation", (event) => broken.add(event.effectiveDirective));
    const add = (name, attributes) => document.body.append(Object.assign(document.createElement(name), attributes));
    const tries = {
        text: () => add("script", { textContent: "window.ran = 'text'" }),
        foreign: () => add("script", { src: "http://127.0.0.1:9/a.js" }),
        html: () => { document.body.innerHTML += "<img src=x onerror='window.ran = 1'>"; },
        handler: () => {
            const link = document.createElement("a");
            link.setAttribute("onclick", "window.ran = 'handler'");
            document.body.append(link);
            link.click();
        },
        frame: () => add("iframe", { src: "/livez" }),
        base: () => add("base", { href: "http://127.0.0.1:9/" }),
        picture: () => add("img", { src: "/livez" }),
        request: () => fetch("http://127.0.0.1:9/"),
    };
    for (const [name, attempt] of Object.entries(tries)) {
        try { await attempt(); } catch { thrown.push(name); }
    }
    await new Promise((done) => setTimeout(done, 200));
    return { ran: window.ran ?? null, broken: [...broken].sort(), thrown: thrown.sort() };
}"""


async def test_the_policy_of_the_page_lets_no_code_run_that_is_not_its_own(daemon: Daemon) -> None:
    def look() -> dict[str, Any]:
        with browser.open_browser() as chromium:
            page = chromium.new_page()
            page.goto(f"http://{daemon.http}/console")
            page.get_by_role("heading", name="Streams").wait_for()
            return dict(page.evaluate(TRIES))

    found = await trio.to_thread.run_sync(look)
    assert found["ran"] is None
    assert found["thrown"] == ["foreign", "handler", "html", "request", "text"]
    assert set(found["broken"]) >= {
        "base-uri", "connect-src", "frame-src", "img-src", "require-trusted-types-for"
    }  # fmt: skip
