"""Lines that are valid in form, with arguments that nobody expects. From the declarations of the commands, by a seed.

A new command needs nothing here. A new kind of argument needs a line in `VALUES`, as in `tests.strategies`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from replicad.errors import ReplicadError
from replicad.protocol.command import Command
from replicad.protocol.fields import Argument
from replicad.protocol.tokens import Cursor
from replicad.protocol.words import Side
from replicad.tubes.commands import Part
from tests.vocabulary import COMMANDS

BIG = (1 << 63) - 1
INTEGERS = (0, 1, -1, 2, 3, 127, 2**15, 2**31 - 1, 2**31, 2**53 + 1, BIG, -BIG - 1, 999_999_999, 10**18)
WORDS = (
    "master", "NOW", "EARLIEST", "linear", "*", "%", "_", "'", '"', "\\", "--", ";", "$1", "null", "None", "[]", "{}",
    "0", "-1", "1e400", "NaN", "Infinity", "true", "../../etc/passwd", "x" * 255, "y" * 4000, "\u202e", "\u200b",
    "\ufeff",
    "\U0001f600" * 50, "e\u0301" * 100, "a=b", "ttl=1", "holder=x", "0/1", "32767/32768", "1.0", "9" * 30, "9" * 4000,
    "1~1.2", ",", "a,b,,c", "tube:t",
)  # fmt: skip
JSONS = (
    "[" * 500 + "]" * 500,
    '{"a":' * 200 + "1" + "}" * 200,
    "[1e999]",
    '["\\u0000"]',
    '["\\ud800"]',
    "[]",
    "{}",
    '{"":{}}',
)
SECONDS = (0.0, 1e-6, 0.2, 0.5, 1.0, 60.0, 3600.0, 86_400.0, 999_999.999999)

Make = Callable[[random.Random], Any]


def _array(size: int) -> Make:
    values = (None, True, False, 0, -1, BIG, -BIG - 1, "", "x" * 300, "\u202e", 1.5)
    return lambda chance: json.dumps([chance.choice(values) for _ in range(size)])


def _part(chance: random.Random) -> Part:
    of = chance.choice((1, 1, 1, 2, 32768))
    return Part(chance.randrange(of), of)


def _integers(chance: random.Random) -> tuple[int, ...]:
    return tuple(chance.choice(INTEGERS) for _ in range(chance.choice((1, 1, 2, 5, 200))))


def _word(chance: random.Random) -> str:
    return chance.choice(WORDS)


def _integer(chance: random.Random) -> int:
    return chance.choice(INTEGERS)


VALUES: dict[str, Make] = {
    "word": _word,
    "word_or": _word,
    "token": _word,
    "integer": _integer,
    "integer_or": lambda chance: chance.choice((None, *INTEGERS)),
    "small": _integer,
    "seconds": lambda chance: chance.choice(SECONDS),
    "one_of": lambda chance: chance.choice(("arrow", _word(chance))),
    "flag": lambda chance: True,
    "choice": lambda chance: chance.random() < 0.5,
    "integers": _integers,
    "keys_or_all": lambda chance: chance.choice(((), _integers(chance), tuple(_word(chance) for _ in range(3)))),
    "part": _part,
    "cursor": lambda chance: Cursor(abs(_integer(chance)) & BIG, abs(_integer(chance)) & BIG),
    "text": lambda chance: chance.choice((*WORDS, " ", "a  b", *JSONS)),
    "name": lambda chance: chance.choice((*WORDS, "a b c")),
    "json_array_3": _array(3),
    "json_array_5": _array(5),
    "json_object": lambda chance: chance.choice((*JSONS, json.dumps({_word(chance): _integer(chance)}))),
    "names": lambda chance: tuple(_word(chance) for _ in range(chance.choice((1, 3, 100)))),
    "where": lambda chance: (_word(chance), chance.choice((*WORDS, ""))),
    "numbers": lambda chance: tuple({_word(chance): _integer(chance) for _ in range(3)}.items()),
}  # fmt: skip


def kinds() -> list[type[Command]]:
    """What a client may send."""
    return [kind for _, kind in sorted(COMMANDS.items()) if Side.CLIENT in kind.SENDER]


def lines(seed: int, names: Sequence[str], only: Collection[str] | None = None) -> Iterator[str]:
    """Lines without an end, the same for a seed. Half of those with a stream or tube name one of `names`.

    `only`: names of commands; None: all that a client may send.
    """
    chance = random.Random(seed)
    possible = [kind for kind in kinds() if only is None or kind.NAME in only]
    while True:
        kind = chance.choice(possible)
        try:
            line = _command(chance, kind, names).render()
        except (
            ReplicadError,
            ValueError,
            OverflowError,
        ):  # a value outside of its kind, or arguments that exclude each other
            continue
        if len(line.encode("utf-8", "replace")) < 16_000:
            yield line


def _command(chance: random.Random, kind: type[Command], names: Sequence[str]) -> Command:
    values: dict[str, Any] = {}
    more = chance.randint(0, 8)
    for argument in kind.FORM.arguments:
        if argument.place == "optional":
            more -= 1
        there = {"word": True, "optional": more >= 0, "text": not argument.empty or chance.random() < 0.5}
        if argument.place == "literal":
            values[argument.name] = more >= 0 and chance.random() < 0.5
        elif not there.get(argument.place, chance.random() < 0.4):
            values[argument.name] = _missing(argument)
        elif argument.name == kind.OBJECT and chance.random() < 0.5:
            values[argument.name] = chance.choice(names)
        else:
            values[argument.name] = VALUES[argument.kind.name](chance)
    return kind(**values)


def _missing(argument: Argument) -> Any:
    return "" if argument.place == "text" else argument.default
