"""Any command, invented from what its fields declare. A new kind of argument needs a line here; a command none."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from replicad.protocol.command import Command
from replicad.protocol.fields import Argument
from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import Ack, Claim, Part, Pods, Seen
from replicad.tubes.keys import KINDS as KEY_KINDS

BIG = (1 << 63) - 1

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30)
words = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters=" "), min_size=1, max_size=20)
bigints = st.integers(-BIG - 1, BIG)
naturals = st.integers(0, BIG)
counts = st.integers(0, 2**31 - 1)
cursors = st.builds(Cursor, naturals, naturals)
parts = st.integers(1, 32768).flatmap(lambda n: st.builds(Part, st.integers(0, n - 1), st.just(n)))
times = st.integers(0, 10**12).map(lambda micros: micros / 1e6)


def arrays(size: int) -> st.SearchStrategy[str]:
    values = st.none() | st.booleans() | bigints | texts
    return st.lists(values, min_size=size, max_size=size).map(json.dumps)


KINDS: dict[str, st.SearchStrategy[Any]] = {
    "word": words,
    "word_or": st.none() | words.filter(lambda word: word != "None"),
    "token": words.filter(lambda word: word != "linear"),
    "integer": bigints,
    "integer_or": st.none() | bigints,
    "small": counts,
    "seconds": times,
    "flag": st.just(True),
    "choice": st.booleans(),
    "one_of": st.sampled_from(KEY_KINDS),  # of TUBE; those of PODS are in SPECIAL
    "integers": st.lists(bigints, min_size=1, max_size=5).map(tuple),
    "keys_or_all": (st.lists(bigints, max_size=5) | st.lists(texts, max_size=5)).map(tuple),
    "part": parts,
    "cursor": cursors,
    "text": texts.filter(bool),
    "name": texts.filter(bool),
    "json_array_3": arrays(3),
    "json_array_5": arrays(5),
    "json_object": st.dictionaries(texts, naturals | texts, max_size=4).map(json.dumps),
    "where": st.tuples(st.text(min_size=1, max_size=20), st.text(max_size=20)),
    "names": st.lists(words, min_size=1, max_size=5).map(tuple),
    "numbers": st.dictionaries(words, st.integers(1, 999_999_999), min_size=1, max_size=5)
    .filter(lambda numbers: len(set(numbers.values())) == len(numbers))
    .map(lambda numbers: tuple(numbers.items())),
}


def _missing(argument: Argument) -> Any:
    return "" if argument.place == "text" else argument.default


@st.composite
def declared(draw: st.DrawFn, kind: type[Command]) -> Command:
    """A command of which every field is drawn as it is declared; behind an optional word that is missing are none."""
    values: dict[str, Any] = {}
    more = draw(st.integers(0, 20))
    for argument in kind.FORM.arguments:
        if argument.place == "optional":
            more -= 1
        there = {
            "word": True,
            "optional": more >= 0,
            "literal": more >= 0 and draw(st.booleans()),
            "text": not argument.empty or draw(st.booleans()),
        }
        if argument.place == "literal":
            values[argument.name] = there["literal"]
        elif there.get(argument.place, True) and (argument.place in there or draw(st.booleans())):
            values[argument.name] = draw(KINDS[argument.kind.name])
        else:
            values[argument.name] = _missing(argument)
    return kind(**values)


# Commands whose arguments do not go together freely.
SPECIAL: dict[type[Command], st.SearchStrategy[Command]] = {
    Pods: st.builds(
        Pods, words, parts, bigints, after=cursors, limit=st.none() | counts, ids=st.none() | counts,
        backfill=st.none() | counts, wait=st.none() | times, plan=st.booleans(),
    )
    | st.builds(Pods, words, parts, bigints, wait=times.filter(bool), ready=st.booleans())
    | st.builds(Pods, words, parts, bigints, after=cursors, upto=cursors)
    | st.builds(Pods, words, parts, bigints, encoding=st.just("arrow"), payload=st.booleans()),
    Claim: st.builds(Claim, words, parts, ttl=st.none() | times, wait=st.none() | times, holder=st.none() | words)
    | st.builds(Claim, words, parts, wait=times.filter(bool), holder=st.none() | words, ready=st.booleans()),
    Seen: st.builds(
        Seen, words, words, bigints, state=st.none() | st.sampled_from(["same", "unknown", "healed"]),
        shared=st.none() | bigints, since=st.none() | bigints, mended=st.none() | bigints,
    ),
    Ack: st.builds(Ack, words, parts, bigints, seqs=KINDS["integers"])
    | st.builds(Ack, words, parts, bigints, upto=cursors, after=cursors),
}  # fmt: skip


def any_of(kind: type[Command]) -> st.SearchStrategy[Command]:
    """Any command of that kind that can be sent."""
    return SPECIAL[kind] if kind in SPECIAL else declared(kind)
