"""Signatures and secrets of the sender: one secret for each destination, and a time that passes."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from replicad.cli.app import run
from replicad.sender.signing import MAX_AGE, derive, sign, verify

MASTER, OTHER = "m" * 40, "n" * 40
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
NOW = 1_700_000_000.0
REQUEST: dict[str, Any] = {"method": "POST", "target": "/hook?x", "transaction": "t1", "ts": 1, "body": b"{}"}


def signed(destination: str, sent: float = NOW, master: str = MASTER) -> str:
    return sign(derive(master, destination), destination=destination, sent=int(sent * 1000), **REQUEST)


@given(NAMES, NAMES, st.booleans())
def test_a_request_made_for_one_destination_never_verifies_at_another(a: str, b: str, claims: bool) -> None:
    assume(a != b)
    signature = signed(a)
    assert verify(derive(MASTER, a), signature, destination=a, now=NOW, **REQUEST)
    assert not verify(derive(MASTER, b), signature, destination=a if claims else b, now=NOW, **REQUEST)
    assert not verify(derive(MASTER, a), signature, destination=b, now=NOW, **REQUEST)


@given(NAMES, NAMES, st.binary(max_size=30))
def test_what_one_receiver_can_sign_verifies_at_no_other(a: str, b: str, body: bytes) -> None:
    assume(a != b)
    forged = sign(derive(MASTER, a), destination=b, sent=int(NOW * 1000), **(REQUEST | {"body": body}))
    assert not verify(derive(MASTER, b), forged, destination=b, now=NOW, **(REQUEST | {"body": body}))


def test_the_secret_of_a_destination_and_the_signature_are_made_as_the_docs_say() -> None:
    secret = hmac.new(
        MASTER.encode(), b"replicad sender, the secret of a destination\n\xc3\xa9.example", hashlib.sha256
    ).hexdigest()
    assert derive(MASTER, "é.example") == secret
    text = "hmac-sha256-v2\né.example\nPOST\n/hook?x\nt1\n1\n1700000000000\n{}"
    made = hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()
    assert signed("é.example") == f"hmac-sha256-v2={made};sent=1700000000000"


@given(st.floats(-4 * MAX_AGE, 4 * MAX_AGE), st.floats(0.5, 2 * MAX_AGE))
def test_a_signature_is_good_for_as_long_as_the_receiver_says(age: float, most: float) -> None:
    assume(abs(abs(age) - most) > 0.01 and abs(abs(age) - MAX_AGE) > 0.01)  # the time is in whole ms
    secret, signature = derive(MASTER, "a"), signed("a", NOW - age)
    assert verify(secret, signature, destination="a", now=NOW, **REQUEST) == (abs(age) <= MAX_AGE)
    assert verify(secret, signature, destination="a", now=NOW, max_age=most, **REQUEST) == (abs(age) <= most)


def test_the_time_of_sending_cannot_be_changed() -> None:
    made, _, _ = signed("a", NOW - 3600).partition(";")
    assert not verify(derive(MASTER, "a"), f"{made};sent={int(NOW * 1000)}", destination="a", now=NOW, **REQUEST)


def test_during_a_change_a_receiver_accepts_what_either_secret_made_and_afterwards_only_the_new_one() -> None:
    old, new = derive(MASTER, "a"), derive(OTHER, "a")
    for master in (MASTER, OTHER):
        assert verify([new, old], signed("a", master=master), destination="a", now=NOW, **REQUEST)
    assert not verify(new, signed("a"), destination="a", now=NOW, **REQUEST)
    assert not verify([], signed("a"), destination="a", now=NOW, **REQUEST)


@given(
    st.one_of(
        st.text(max_size=100),
        st.sampled_from(
            [
                "",
                "hmac-sha256=" + "0" * 64,
                f"{signed('a')}\n",
                signed("a").replace("-v2", ""),
                signed("a").upper(),
                signed("a") + ",x",
                "hmac-sha256-v2=" + "0" * 64 + ";sent=" + "9" * 400,
                "hmac-sha256-v2=" + "0" * 64 + ";sent=١٧٠٠٠٠٠٠٠٠٠٠٠",
                signed("a") + "\ud800",
            ]
        ),
    )
)
def test_a_header_of_another_form_is_refused_and_raises_nothing(header: str) -> None:
    assert not verify(derive(MASTER, "a"), header, destination="a", now=NOW, **REQUEST)


# --- `replicad sender secret` ---


def test_the_secret_of_a_destination_is_printed_and_the_one_before_on_a_second_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = "https://shop.example/hook"
    file = tmp_path / "sender.toml"
    file.write_text(f'facts = "orders"\nsign = "hmac"\nfederation_secret = "{OTHER}"\n')
    assert run(["sender", "secret", hook, "--config", str(file)]) == 0
    assert capsys.readouterr().out == f"{derive(OTHER, hook)}\n"
    monkeypatch.setenv("REPLICAD_FEDERATION_SECRET_PREVIOUS", MASTER)
    assert run(["sender", "--config", str(file), "secret", hook]) == 0
    assert capsys.readouterr().out == f"{derive(OTHER, hook)}\n{derive(MASTER, hook)}\n"


@pytest.mark.parametrize(
    ("secret", "name", "said"),
    [
        ("", "a", "there is no secret"),
        ("short", "a", "REPLICAD_FEDERATION_SECRET: the value is not valid; give 32"),
        (MASTER, "a\udcff", "not the name of a destination"),
    ],
    ids=["none", "short", "no text"],
)
def test_without_a_secret_that_is_good_enough_nothing_is_printed(
    secret: str, name: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAD_FEDERATION_SECRET", secret)
    assert run(["sender", "secret", name]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert said in err
    assert "m" * 40 not in err
