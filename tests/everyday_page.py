"""The table of everyday events in docs/everyday.md, made from tests/everyday.py; make it anew after a change:

python -m tests.everyday_page
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.everyday import APP, EVENTS, OPERATOR, OWNER, Event

PAGE = Path(__file__).parents[1] / "docs/everyday.md"
SECTION = re.compile(r"(<!-- everyday events -->\n).*?(<!-- end of everyday events -->)", re.DOTALL)
ROLES = {
    "daemon": "the daemon's role",
    OWNER: "the owner of the table",
    APP: "the session's role",
    "postgres": "a superuser",
}
BY_HAND = {  # events whose remedy is no command
    "unpublished": "writers publish their positions",
    "used": "[make column and sequence bigint](#from-integer-to-bigint)",
    "waiting": "start a worker",
    "expired": "start the worker again",
}


def render(page: str) -> str:
    """The page with the table as it is declared; what is around it stays."""
    return SECTION.sub(lambda found: found[1] + table() + found[2], page)


def table() -> str:
    """A row for each event, with blank lines around them."""
    rows = [f"| {event.title} | {_views(event)} | {_remedy(event)} |" for event in EVENTS]
    return "\n".join(["", "| event | seen in | printed remedy, and who runs it |", "|---|---|---|", *rows, "", ""])


def _views(event: Event) -> str:
    views = {"lists": "lists", "doctor": "doctor", "ready": "readiness", "metrics": "metrics"}
    seen = ", ".join(text for view, text in views.items() if view not in event.unseen)
    why = {}
    for view, reason in event.unseen.items():
        why.setdefault(reason, []).append(views[view])
    return seen + "".join(f"; not in {' and '.join(named)}: {reason}" for reason, named in why.items())


def _remedy(event: Event) -> str:
    if event.name in BY_HAND:
        return BY_HAND[event.name]
    return "; ".join(f"`{plain(pattern, event)}` ({ROLES[role]})" for role, pattern in event.remedies)


def plain(pattern: str, event: Event) -> str:
    """The text that a pattern matches, with NAME for the event's own name."""
    text = pattern.replace("{name}", event.name).replace("{app}", "ROLE").replace("{daemon}", "ROLE")
    for found, plain in (
        (r"\\b|\(\?!_\)|run: |\(TABLE \)\?", ""),
        (r"\[\^'\]\+", "SEQUENCE"),
        (r"\\d\+", "N"),
        (r"\\(.)", r"\1"),
    ):
        text = re.sub(found, plain, text)
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return re.sub(rf"(?<!tubes )\b{event.name}(?=\b|_)", "NAME", text)


if __name__ == "__main__":
    assert OPERATOR
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
