"""`replicad access`: what it says of a file, and that its secrets open what they are for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replicad.cli import app
from replicad.config.access import parse_access
from replicad.daemon.access import verbs_of
from tests.vocabulary import EVERY

from .test_access_file import GOOD


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "access.toml"
    made.write_text(GOOD)
    return made


def test_check_lists_the_clients_and_fails_where_the_daemon_would(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["access", "check", str(file)]) == 0
    billing, ops = capsys.readouterr().out.splitlines()
    assert billing == (
        "billing: 2 secrets or certificate spiffe://corp/billing from 10.1.0.0/16, ::1/128; "
        "may read orders*, ack orders*, work invoices, relay, but not read orders_secret"
    )
    assert ops.endswith("; may *")
    file.write_text('[client.a]\nallow = ["raed x"]')
    assert app.run(["access", "check", str(file)]) == 2
    assert "did you mean read?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("question", "status", "said"),
    [
        ("billing read orders", 0, 'billing may read orders: allow has "read orders*"'),
        ("billing read orders_secret", 1, 'billing may not read orders_secret: deny has "read orders_secret"'),
        ("billing work payroll", 1, "billing may not work payroll: no line of allow covers it"),
        ("billing list invoices", 0, "billing may list invoices: another right on the name gives it"),
        ("billing relay", 0, 'billing may relay: allow has "relay"'),
        ("ops doorbell", 0, 'ops may doorbell: allow has "*"'),
        ("nobody read x", 2, "has no [client.nobody]"),
        ("billing fly x", 2, "there is no verb 'fly'"),
        ("billing read", 2, "read needs the name"),
        ("billing relay x", 2, "relay takes no name"),
    ],
)
def test_it_says_what_a_client_may_do_and_why(
    file: Path, question: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["access", "test", *question.split(), "--access-file", str(file)]) == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_a_secret_is_made_for_a_client_and_opens_what_its_line_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["access", "token", "billing"]) == 0
    word, line = capsys.readouterr().out.splitlines()
    made = parse_access(f"[client.billing]\n{line}", verbs_of(EVERY), "f").clients["billing"]
    name, _, secret = word.partition(".")
    assert name == "billing"
    assert len(secret) >= 43
    assert made.has_secret(secret)
    out = tmp_path / "token"
    assert app.run(["access", "token", "billing", "--out", str(out)]) == 0
    assert out.read_text().startswith("billing.")
    assert os.stat(out).st_mode & 0o777 == 0o600
    assert out.read_text().strip().partition(".")[2] not in capsys.readouterr().out
    assert app.run(["access", "token", "billing", "--out", str(out)]) == 3, "it is not overwritten"
    assert app.run(["access", "token", "a.b"]) == 2
