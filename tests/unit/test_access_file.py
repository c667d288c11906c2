"""The access file: what is refused, and whether a client may do something, against a second way to decide it."""

from __future__ import annotations

import os
import tracemalloc
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicad.config.access import MAX_DECISIONS, MOST_FAULTS, Client, Rule, Verbs, parse_access, read_access
from replicad.config.logs import Recent
from replicad.daemon.access import AccessControl, verbs_of
from replicad.errors import UsageError
from replicad.operations.http.console import is_visible
from replicad.operations.http.entry import Caller
from replicad.protocol.words import Side
from tests.lengths import examples
from tests.vocabulary import COMMANDS, EVERY

VERBS = verbs_of(EVERY)
DIGEST = sha256(b"one").hexdigest()
OTHER = sha256(b"two").hexdigest()
GOOD = f"""
[client.billing]
token_sha256 = ["{DIGEST}", "{OTHER}"]
certificate = "spiffe://corp/billing"
from = ["10.1.0.0/16", "::1"]
allow = ["read orders*", "ack orders*", "work invoices", "relay"]
deny = ["read orders_secret"]
instances = ["billing-*"]
connections = 50
catchups = 2

[client.ops]
certificate = ["spiffe://corp/ops", "ops.Corp.example"]
allow = ["*"]
"""


def refused(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_access(text, VERBS, "access.toml")
    return str(caught.value)


def client(allow: str = "[]", deny: str = "[]", more: str = "") -> Client:
    allow, deny = (f"{key} = {value}\n" if value != "[]" else "" for key, value in (("allow", allow), ("deny", deny)))
    return parse_access(f'[client.a]\ntoken_sha256="{DIGEST}"\n{allow}{deny}{more}', VERBS, "f").clients["a"]


def test_the_example_of_the_docs_is_read() -> None:
    found = parse_access(GOOD, VERBS, "f")
    billing, ops = found.clients["billing"], found.clients["ops"]
    assert (billing.connections, billing.catchups) == (50, 2)
    assert billing.may("read", "orders")
    assert billing.may("read", "orders_eu")
    assert billing.may("relay")
    assert not billing.may("read", "orders_secret")
    assert billing.may("ack", "orders_secret")
    assert not billing.may("read", "payroll")
    assert not billing.may("doorbell")
    assert not billing.may("park", "invoices")
    assert billing.may("list", "invoices")
    assert not billing.may("list", "payroll")
    assert billing.has_secret("one")
    assert billing.has_secret("two")
    assert not billing.has_secret("three")
    assert billing.is_from("10.1.255.3")
    assert billing.is_from("::ffff:10.1.0.1")
    assert billing.is_from("::1")
    assert not billing.is_from("10.2.0.1")
    assert not billing.is_from("memory")
    assert billing.speaks_for("billing-3")
    assert not billing.speaks_for("billing")
    assert all(ops.may(verb, "x") for verb in VERBS.named)
    assert all(ops.may(verb) for verb in VERBS.plain)
    assert ops.speaks_for("anybody")
    assert ops.is_from("8.8.8.8")
    assert found.by_certificate(["spiffe://corp/x", "spiffe://corp/ops"]) is ops
    assert found.by_certificate(["ops.corp.example"]) is ops
    assert found.by_certificate([]) is found.by_certificate(["spiffe://corp"]) is None
    assert DIGEST not in repr(billing)
    assert str(bytes.fromhex(DIGEST)) not in repr(billing)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "client: there is no client; write a table such as [client.billing]"),
        ("[client.a]\nallow = 5 5", "(at line 2, column 11)"),
        ("[client.a", "is not TOML: Expected ']'"),
        ("[client.a]\nallow = [", "Invalid value (at end of document)"),
        ("[clients.a]", "clients is not known; did you mean client?"),
        ("[client]\na = 1", "[client.a]: this must be a table"),
        ('[client."a.b"]\ncertificate = "x"', "[client.a.b]: a client's name has 1 to 64 letters"),
        ('[client.a]\nallow = ["*"]', "[client.a]: the client cannot prove who it is"),
        ('[client.a]\ntoken = "x"', "[client.a] token is not known; there are token_sha256"),
        ('[client.a]\ntoken_sha256 = "s3cret"', "[client.a] token_sha256: the value is not valid; give the 64 hex"),
        ('[client.a]\ntoken_sha256 = []', "[client.a] token_sha256: the array is empty"),
        (f'[client.a]\ntoken_sha256 = ["{DIGEST}", "{OTHER}", "{"0" * 64}"]', "there are 3 secrets; at most 2"),
        (f'[client.a]\ntoken_sha256 = ["{DIGEST}", "{DIGEST}"]', "[client.a] has the same; give each its own"),
        (f'[client.a]\ntoken_sha256 = "{DIGEST}"\n[client.b]\ntoken_sha256 = "{DIGEST}"', "[client.a] has the same"),
        ('[client.a]\ncertificate = "x"\n[client.b]\ncertificate = "X"', "[client.b] certificate: [client.a] has"),
        ('[client.a]\ncertificate = "x y"', "'x y' is not valid; give the URI or the DNS name"),
        ('[client.a]\ncertificate = 5', "[client.a] certificate: this must be a text or an array of texts"),
        ('[client.a]\ncertificate = "x"\nfrom = "10.1.2.3/16"', "'10.1.2.3/16' is not valid; 10.1.2.3/16 has host"),
        ('[client.a]\ncertificate = "x"\nallow = ["raed orders"]', "'raed orders' is not valid; did you mean read?"),
        ('[client.a]\ncertificate = "x"\nallow = ["fly orders"]', "the verbs are ack, doorbell, list, park"),
        ('[client.a]\ncertificate = "x"\nallow = ["read"]', "name the streams or tubes: 'read orders*', or 'read *'"),
        ('[client.a]\ncertificate = "x"\nallow = ["relay orders"]', "relay takes no name; write 'relay'"),
        ('[client.a]\ncertificate = "x"\ndeny = ["read a b"]', "[client.a] deny: 'read a b' is not valid; it is"),
        ('[client.a]\ncertificate = "x"\nallow = ["read  a"]', "write one verb, one blank and one pattern"),
        ('[client.a]\ncertificate = "x"\nallow = ["read a b"]', "'read a b' is not valid; it is written as column=val"),
        ('[client.a]\ncertificate = "x"\nallow = ["read a =b"]', "it is written as column=value"),
        ('[client.a]\ncertificate = "x"\nallow = ["read a b=%00"]', "no text of Postgres has the character U+0000"),
        ('[client.a]\ncertificate = "x"\nallow = ["read a b=%ff"]', "its escapes with % are no UTF-8"),
        ('[client.a]\ncertificate = "x"\nallow = ["read a b=1 c=2"]', "write one verb, one blank and one pattern"),
        ('[client.a]\ncertificate = "x"\nallow = ["ack a b=1"]', "write one verb, one blank and one pattern"),
        ('[client.a]\ncertificate = "x"\nallow = ["* a b=1"]', "write one verb, one blank and one pattern"),
        ('[client.a]\ncertificate = "x"\ndeny = ["read a b=1"]', "`deny` is about whole streams"),
        ('[client.a]\ncertificate = "x"\nconnections = 0', "connections: 0 is out of range; give a number from 1 to 1"),
        ('[client.a]\ncertificate = "x"\ncatchups = true', "[client.a] catchups: true is not valid; give a whole"),
        ('[client.a]\ncertificate = "x"\ninstances = ["a b"]', "give the name of an instance, or a pattern"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_key_and_the_remedy(text: str, expected: str) -> None:
    assert expected in refused(text)


def test_all_faults_of_a_file_are_named_at_once_and_no_secret_is_in_the_message() -> None:
    found = refused('[client.a]\ntoken_sha256 = "hush-hush"\nallow = ["raed x"]\n[client.b]\nconnections = -1')
    assert len(found.splitlines()) == 4
    assert "hush" not in found


def test_a_file_that_others_can_change_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    file.write_text(GOOD)
    file.chmod(0o646)
    with pytest.raises(UsageError, match=r"can change .*chmod o-w"):
        read_access(file, VERBS)
    file.chmod(0o644)
    assert set(read_access(file, VERBS).clients) == {"billing", "ops"}
    file.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_access(file, VERBS)
    os.unlink(file)
    with pytest.raises(UsageError, match="No such file"):
        read_access(file, VERBS)


def test_every_command_of_a_client_has_a_decision() -> None:
    sent = {name for name, kind in COMMANDS.items() if kind.SENDER & Side.CLIENT and kind.VERB is None}
    assert sent == {"PING", "NAME", "AUTH", "HELP", "ERROR"}, "every other command of a client needs a verb"
    for kind in COMMANDS.values():
        if kind.VERB is not None:
            names = {argument.name for argument in kind.FORM.arguments}
            assert kind.OBJECT in names or not names & {"stream", "tube"}, f"{kind.NAME}: what is the verb needed on?"
    assert VERBS.named == {"list", "read", "ack", "work", "park", "report"}
    assert VERBS.plain == {"presence", "relay", "doorbell"}


def test_the_decisions_that_are_kept_are_bounded() -> None:
    made = client('["read a*"]')
    for number in range(2 * MAX_DECISIONS + 10):
        assert made.may("read", f"a{number}")
        assert not made.may("read", f"b{number}")
    assert len(made._decided) <= MAX_DECISIONS


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [("a*", "a", True), ("a?", "a", False), ("a?", "ab", True), ("[ab]", "a", False), ("[ab]", "[ab]", True),
     ("A", "a", False), ("a.b", "axb", False), ("*", "\u00e4\n", True),
     ("a*b*c", "axxbxxc", True), ("\\*", "*", False)],
)  # fmt: skip
def test_a_pattern_has_two_special_characters(pattern: str, name: str, matches: bool) -> None:
    assert Rule("read", pattern).covers("read", name) is matches


def test_a_part_is_less_than_the_stream_and_the_name_may_be_known() -> None:
    made = client('["read orders* customer=7", "read orders a%20b=%25", "read whole", "read w* a=1"]')
    assert made.parts("orders") == (("customer", "7"), ("a b", "%"))
    assert not made.may("read", "orders")
    assert made.may("list", "orders_old")
    assert made.parts("Orders") == ()
    assert made.may("read", "whole")
    assert str(made.allow[1]) == "read orders a%20b=%25"
    assert client('["read * a=1"]', '["read b"]').parts("b") == ()
    assert client('["read * a=1"]', '["list b"]').parts("b") == ()


def test_a_pattern_of_many_stars_takes_no_long_time() -> None:
    assert not Rule("read", "*a" * 100 + "b").covers("read", "a" * 1024)


def test_without_instances_a_client_speaks_for_its_own_name_and_what_begins_with_it() -> None:
    made = client('["ack *"]')
    assert made.speaks_for("a")
    assert made.speaks_for("a-1")
    assert not made.speaks_for("ab")
    assert not made.speaks_for("b")
    assert not made.speaks_for("")


# --- an oracle ---

LETTERS = st.sampled_from("ab_")
NAMES = st.text(LETTERS, min_size=1, max_size=4)
PATTERNS = st.text(st.sampled_from("ab_*?"), min_size=1, max_size=4)
VERB = st.sampled_from([*sorted(VERBS.named), "*"])
LINES = st.one_of(st.tuples(VERB, PATTERNS).map(" ".join), st.sampled_from([*sorted(VERBS.plain), "*"]))


def matches(pattern: str, name: str) -> bool:
    """By the definition of the two characters, one at a time."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return matches(pattern[1:], name) or (name != "" and matches(pattern, name[1:]))
    return name != "" and pattern[0] in ("?", name[0]) and matches(pattern[1:], name[1:])


def said(lines: list[str], verb: str, name: str | None) -> bool:
    for line in lines:
        head, _, pattern = line.partition(" ")
        if line == "*" or (head in (verb, "*") and (name is None) == (pattern == "") and matches(pattern, name or "")):
            return True
    return False


def oracle(allow: list[str], deny: list[str], verb: str, name: str | None) -> bool:
    if said(deny, verb, name) or (name is not None and said(deny, "list", name)):
        return False
    if said(allow, verb, name):
        return True
    return verb == "list" and any(oracle(allow, deny, other, name) for other in VERBS.named - {"list"})


@given(st.lists(LINES, max_size=5), st.lists(LINES, max_size=3), st.lists(NAMES, min_size=1, max_size=5))
@settings(deadline=None, max_examples=examples(300))
def test_the_matrix_of_verbs_and_names_is_as_the_oracle_says(
    allow: list[str], deny: list[str], names: list[str]
) -> None:
    made = client(repr(allow), repr(deny))
    for verb in VERBS.named:
        for name in names:
            assert made.may(verb, name) is oracle(allow, deny, verb, name), (verb, name)
    for verb in VERBS.plain:
        assert made.may(verb) is oracle(allow, deny, verb, None), verb


def test_verbs_are_with_a_name_or_without() -> None:
    with pytest.raises(AssertionError):
        Verbs(frozenset({"read"}), frozenset({"read"}))


def test_what_was_decided_of_long_names_is_not_kept() -> None:
    """Over HTTP a client may ask for a stream whose name has 15,000 characters, and for another one each time."""
    made = client('["read orders*"]')
    tracemalloc.start()
    try:
        for number in range(500):
            assert made.may("read", f"orders{number}" + "x" * 10_000)
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("allow", "deny", "everything"),
    [
        (["*"], [], True),
        (["status", "list *"], ["replay x"], True),
        (["read *"], [], True),
        (["read *"], ["read x"], False),
        (["read *", "work *"], ["read x"], True),
        (["*"], ["list secret*"], False),
        (["*"], ["*"], False),
        (["status", "list a*"], [], False),
        (["status"], [], False),
    ],
)
def test_who_may_list_everything_may_list_also_what_is_gone_or_comes(
    allow: list[str], deny: list[str], everything: bool
) -> None:
    verbs = Verbs(VERBS.named | {"replay"}, VERBS.plain | {"status"})
    text = f'[client.a]\ntoken_sha256="{DIGEST}"\nallow={allow}\n' + (f"deny={deny}\n" if deny else "")
    assert parse_access(text, verbs, "f").clients["a"].lists_everything is everything


def test_an_event_that_names_a_stream_is_seen_only_by_who_may_list_it_also_when_the_stream_is_gone(
    tmp_path: Path,
) -> None:
    file = tmp_path / "access.toml"
    file.write_text(f'[client.a]\ntoken_sha256="{DIGEST}"\nallow=["status", "list *"]\ndeny=["list secret*"]\n')
    control = AccessControl(file=file, verbs=Verbs(VERBS.named, VERBS.plain | {"status"}))
    access = control.enter("127.0.0.1:1")
    access.client = control.known.clients["a"]
    caller = Caller(access, None, None)
    gone = Recent(1, 0.0, "info", "stream_removed", {"stream": "secret_a"})
    other = Recent(2, 0.0, "info", "stream_removed", {"stream": "orders"})
    text = Recent(3, 0.0, "info", "request_refused", {"error": "there is no stream 'secret_a'"})
    assert [is_visible(each, caller) for each in (gone, other, text)] == [False, True, False]


@pytest.mark.parametrize(
    "text",
    [
        "[client.a]\n" + "".join(f"allowx{number} = 1\n" for number in range(20_000)),
        f'[client.a]\ntoken_sha256="{DIGEST}"\nallow=['
        + ",".join(f'"raed{number} x"' for number in range(20_000))
        + "]",
        "".join(f"[client.c{number}]\n" for number in range(20_000)),
        f'[client.a]\ntoken_sha256="{DIGEST}"\n"{"k" * 100_000}" = 1\n',
    ],
    ids=["keys", "verbs", "clients", "a long key"],
)
def test_a_file_of_faults_is_refused_by_a_short_message(text: str) -> None:
    """At a reload the daemon waits for it, and logs it: 20,000 faults took 12 s and made a line of 2 MB."""
    found = refused(text)
    assert len(found) < 10_000
    assert len(found.splitlines()) <= MOST_FAULTS + 1
