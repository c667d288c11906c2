"""Remedies of SQL functions as commands that a shell takes, whatever a name holds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.positions.horizon import Holder, HolderKind
from replicad.remedies import FORMS, Who
from replicad.terminal.failures import as_commands
from replicad.terminal.holders import remedy_for
from tests import everyday_page
from tests.everyday import EVENTS

# Remedies that no everyday event prints, and the tests that run them or see them.
ELSEWHERE = {
    "cancel_backfill": "integration/test_backfill.py",
    "retire_writer": "integration/test_cli_stream_writers.py",
    "locks": "unit/test_remedies.py",
    "show_stream": "integration/test_cli_database.py",
    "list_tubes": "integration/test_cli_database.py",
    "list_sender_parked": "integration/test_sender_parked.py",
    "reset_read_only": "integration/test_doctor.py",
    "see_sessions": "integration/test_doctor.py",
    "own_type": "integration/test_doctor.py",
    "start_daemon": "integration/test_doctor.py",
    "start_worker": "integration/test_doctor.py",
    "start_sender": "integration/test_doctor.py",
}


def test_every_remedy_is_run_by_the_test_of_an_everyday_event_or_by_another_one() -> None:
    run = [everyday_page.plain(pattern, event) for event in EVENTS for _, pattern in event.remedies]
    for name, form in FORMS.items():
        pattern = re.sub(r"\\\{\w+\\\}", ".*", re.escape(form.text))
        assert any(re.fullmatch(pattern, text) for text in run) != (name in ELSEWHERE), name
    assert ELSEWHERE.keys() <= FORMS.keys()
    assert all((Path(__file__).parents[1] / file).exists() for file in ELSEWHERE.values())


def test_a_holder_without_a_name_has_a_look_as_its_remedy() -> None:
    remedy = remedy_for(Holder(HolderKind.TABLE_LOCK))
    assert (remedy, remedy.who) == ("SELECT * FROM pg_locks WHERE NOT granted", Who.ANYONE)


def test_the_table_of_everyday_events_is_what_is_declared() -> None:
    text = everyday_page.PAGE.read_text(encoding="utf-8")
    assert everyday_page.render(text) == text, "run `python -m tests.everyday_page`"
    assert len(EVENTS) >= 42


NAMES = st.text(st.characters(min_codepoint=33, exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1)


@given(NAMES, st.sampled_from(["stream_remove", "writer_enable"]))
def test_a_name_is_one_word_of_the_command(name: str, function: str) -> None:
    call = f"SELECT replicad.{function}('{name.replace(chr(39), chr(39) * 2)}')"
    if function == "stream_remove":
        words = ["replicad", "streams", "remove", name]
        text = as_commands(f"run: {call}").removeprefix("run: ")
    else:
        words = ["replicad", "sharding", "enable", name]
        text = as_commands(f"run `replicad sharding enable {name}`, or: {call}").removeprefix("run `").removesuffix("`")
    assert shlex.split(text) == words


@pytest.mark.parametrize("text", ["it is so", "SELECT replicad.stream_trim('s', 5)"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert as_commands(text) == text
