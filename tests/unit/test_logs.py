"""Logs: one event per line, readable by machines or people, with no secret in it, whoever reads it or goes away."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

import replicad
from replicad.config.logs import RECENT, configure_logs
from replicad.config.settings import LogSettings
from replicad.eventlog import get_logger
from replicad.masking import LONGEST_MESSAGE, mask_secrets, mask_value

words = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    yield io.StringIO()
    structlog.reset_defaults()
    logging.getLogger().handlers[:], logging.getLogger().level = handlers, level
    logging.getLogger("replicad").setLevel(logging.NOTSET)


def test_events_are_json_lines_with_level_time_and_fields(output: io.StringIO) -> None:
    configure_logs(LogSettings(), output)
    structlog.get_logger().info("session_closed", peer="w1", reason="SLOW_READER", text="two\nlines")
    structlog.get_logger().debug("too_much_detail")
    (line,) = output.getvalue().splitlines()
    event = json.loads(line)
    assert event["event"] == "session_closed"
    assert event["level"] == "info"
    assert event["timestamp"].endswith("Z")
    assert (event["peer"], event["reason"], event["text"]) == ("w1", "SLOW_READER", "two\nlines")


def test_no_secret_reaches_the_log_wherever_it_stands(output: io.StringIO) -> None:
    configure_logs(LogSettings(), output)
    log = structlog.get_logger()
    log.info("a", url="postgresql://u:hunter2@h/d", nested={"dsn": ["host=h password='hunter2 x' dbname=d"]})
    log.info("AUTH hunter2", password="hunter2")
    logging.getLogger("driver").warning("cannot connect to %s", "postgres://u:hunter2@h")
    try:
        raise OSError("postgresql://u:hunter2@h/d is away")
    except OSError:
        log.exception("failed")
    text = output.getvalue()
    assert "hunter2" not in text
    assert len([json.loads(line) for line in text.splitlines()]) == 4


def test_the_last_events_are_kept_as_the_log_has_them(output: io.StringIO) -> None:
    configure_logs(LogSettings(), output)
    last = max((one.number for one in RECENT.after(0)), default=0)
    log = structlog.get_logger()
    log.debug("hidden")
    log.warning("shown", url="postgresql://u:hunter2@h/d", password="hunter2")
    (one,) = RECENT.after(last)
    assert (one.event, one.level) == ("shown", "warning")
    assert "hunter2" not in str(one.fields)
    assert one.fields.keys() == {"url", "password"}


def test_text_form_is_for_people_and_masks_as_well(output: io.StringIO) -> None:
    configure_logs(LogSettings(log_format="text"), output, colour=False)
    structlog.get_logger().warning("listening", at="127.0.0.1:9009", url="postgresql://u:hunter2@h/d")
    assert "listening" in output.getvalue()
    assert "at=127.0.0.1:9009" in output.getvalue()
    assert "hunter2" not in output.getvalue()
    assert "\x1b" not in output.getvalue()


def test_a_reader_that_went_away_does_not_end_the_program(output: io.StringIO) -> None:
    configure_logs(LogSettings(), output)
    log = structlog.get_logger()
    output.close()
    log.info("nobody_listens")
    assert output.closed


# --- what users import as a library ---


def test_a_librarys_event_is_a_message_for_any_handler_with_event_and_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "replicad")
    log = get_logger("replicad.somewhere").bind(stream="events")
    log.debug("too_much_detail")
    log.info("rows_lost", rows=5, why="100% gone")
    try:
        raise OSError("away")
    except OSError:
        log.exception("not_followed")
    lost, not_followed = caplog.records
    assert lost.getMessage() == "rows_lost stream=events rows=5 why=100% gone"
    assert (lost.name, lost.levelname, lost.funcName) == (
        "replicad.somewhere",
        "INFO",
        "test_a_librarys_event_is_a_message_for_any_handler_with_event_and_fields",
    )
    assert vars(lost)["event"] == "rows_lost"
    assert vars(lost)["fields"] == {"stream": "events", "rows": 5, "why": "100% gone"}
    assert not_followed.exc_info is not None


def test_the_command_line_keeps_the_events_and_fields_of_libraries(output: io.StringIO) -> None:
    configure_logs(LogSettings(), output)
    log = get_logger("replicad.somewhere")
    log.debug("too_much_detail")
    log.info("rows_lost", rows=5, url="postgresql://u:hunter2@h/d", event="a name that is taken", level=7)
    logging.getLogger("replicad.spark").info("a sentence with %d words", 5)
    logging.getLogger("driver").info("nobody asked")
    try:
        raise OSError("postgresql://u:hunter2@h/d is away")
    except OSError:
        log.exception("not_followed")
    lost, sentence, not_followed = [json.loads(line) for line in output.getvalue().splitlines()]
    assert (lost["event"], lost["level"], lost["rows"]) == ("rows_lost", "info", 5)
    assert (sentence["event"], sentence["message"]) == ("library_message", "a sentence with 5 words")
    assert (not_followed["event"], not_followed["level"]) == ("not_followed", "error")
    assert "OSError" in not_followed["exception"]
    assert "hunter2" not in output.getvalue()


LIBRARIES = (
    "client",
    "streams.writer",
    "streams.blocking_writer",
    "streams.inflight",
    "sharding",
    "caches",
    "presence.reporter",
    "spark",
    "postgres",
    "eventlog",
)


def test_no_library_logs_or_prints_by_other_means() -> None:
    """structlog prints to stdout where nobody has configured it, so only the daemon and the command line use it."""
    root = Path(replicad.__file__).parent
    for name in LIBRARIES:
        path = root / name.replace(".", "/")
        files = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else [*path.rglob("*.py")]
        assert files, name
        for file in files:
            if "cli" not in file.relative_to(root).parts:
                assert not re.search(r"\bstructlog\b|\bprint\(", file.read_text()), file


@given(words, words, words)
def test_a_password_in_a_url_never_survives(user: str, password: str, host: str) -> None:
    masked = mask_secrets(f"cannot reach postgresql://{user}:PW{password}!@{host}:5432/db, trying again")
    assert masked == f"cannot reach postgresql://{user}:***@{host}:5432/db, trying again"


@pytest.mark.parametrize(
    "text", ["POSITION events master 53 53", "http://host:80/path", "a:b@c", "https://h/p?x=1&y=2"]
)
def test_text_without_secrets_stays_as_it_is(text: str) -> None:
    assert mask_secrets(text) == text


def test_masking_keeps_numbers_and_the_shape_of_containers() -> None:
    assert mask_value({"a": [1, None, True, 1.5, {"b": "x"}]}) == {"a": [1, None, True, 1.5, {"b": "x"}]}
    assert mask_value({"l1": {"l2": {"l3": {"l4": {"l5": "password=x1"}}}}}) != {}
    assert "x1" not in json.dumps(mask_value({"l1": {"l2": {"l3": {"l4": {"l5": "password=x1"}}}}}))


def test_a_field_repeats_no_long_input_and_no_part_of_a_secret(output: io.StringIO) -> None:
    configure_logs(LogSettings(), output)
    for text in ("x" * 100_000, "password=" + "p" * 100_000, "a\x1b" * 50_000):
        structlog.get_logger().warning("peer_error", error=text, more=[text])
    for line in output.getvalue().splitlines():
        assert len(line) < 3 * LONGEST_MESSAGE
        assert "ppp" not in line
