"""What one client has of one stream, by the rules of protocol.md alone: it shares no code with our clients.

A `Ledger` takes the lines of one stream and keeps the rows by writer and id. It obeys what goes back: a POSITION whose
new token is below what it has, a refusal that names a token to resume from, a refusal that names none. It notes what
no server may do (rows again without having said so, rows out of order, a position that begins elsewhere), and is
compared with the table in the end.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

BEFORE_ALL = -1  # below every id of the tables of these tests

Row = tuple[str, int, str]  # writer, id, body; the body is unique

_TOKEN = re.compile(r"(?:([0-9a-f]+)!)?(-?\d+)((?:~\d+\.-?\d+)*)")
_RESUME = re.compile(r"resume from (\S+)$")


class Order(Enum):
    """What a client subscribes to."""

    PLAIN = "plain"  # REPLICATE: no token, begins at the present position
    NAMED = "named"  # REPLICATE stream: a position for each writer, vector tokens
    LINEAR = "linear"  # REPLICATE stream token linear: one position


ALL = "*"  # the instance of a linear POSITION


@dataclass(frozen=True)
class Difference:
    """What a client lacks of the table, and what it has that the table has not."""

    lost: tuple[Row, ...]
    kept: tuple[Row, ...]

    def __bool__(self) -> bool:
        return bool(self.lost or self.kept)

    def __str__(self) -> str:
        return f"{len(self.lost)} lost {_some(self.lost)}, {len(self.kept)} kept though gone {_some(self.kept)}"


class Ledger:
    """The rows and positions of one stream at one client."""

    def __init__(self, stream: str, order: Order) -> None:
        self.stream = stream
        self.order = order
        self.epoch: str | None = None
        self.numbers: dict[str, int] = {}
        self.at: dict[str, int] = {}  # how far each writer has got; ALL where the order is linear
        self.findings: list[str] = []
        self.counts: Counter[str] = Counter()
        self._rows: defaultdict[str, dict[int, list[str]]] = defaultdict(dict)
        self._base: dict[str, int] = {}  # rows of a writer are expected above this
        self._batch: list[Row] = []
        self._listed: set[str] | None = None  # of a set of WRITERS that no POSITION has followed yet
        self._placed: set[str] = set()  # the writers that had a POSITION on this connection

    # --- a life in connections ---

    def connected(self) -> None:
        """A new connection is made. A plain client begins with nothing: it has no token to ask for what it missed."""
        self._batch.clear()
        self._listed = None
        self._placed.clear()
        if self.order is Order.PLAIN:
            self.counts["plain begins"] += 1
            self._rows.clear()
            self._base.clear()
            self.at.clear()

    def request(self) -> str:
        """The REPLICATE that goes on from what it has."""
        token = self.token()
        order = " linear" if self.order is Order.LINEAR else ""
        return f"REPLICATE {self.stream} {'EARLIEST' if token is None else token}{order}"

    def token(self) -> str | None:
        """Where it stands, or None at the very beginning."""
        if not self.at:
            return None
        lowest = min(self.at.values())
        head = "" if self.epoch is None else f"{self.epoch}!"
        ahead = sorted((self.numbers[name], at) for name, at in self.at.items() if at > lowest and name in self.numbers)
        return f"{head}{lowest}" + "".join(f"~{number}.{at}" for number, at in ahead)

    def refused(self, text: str) -> None:
        """The answer to `request` was an ERROR that voids the token: `bad_token: ...` and its like."""
        self._batch.clear()
        resume = _RESUME.search(text)
        if text.startswith("bad_token:") and resume is not None:
            self.counts["rewound by name"] += 1
            self._rewind_to(resume[1])
            return
        self.counts[f"begins again after {text.partition(':')[0]}"] += 1
        self._rows.clear()
        self._base.clear()
        self.at.clear()
        self.numbers.clear()
        self.epoch = None

    def _rewind_to(self, token: str) -> None:
        found = _TOKEN.fullmatch(token)
        if found is None:
            self.findings.append(f"the token to resume from is none: {token!r}")
            return
        epoch, lowest, rest = found[1], int(found[2]), found[3]
        ahead = {int(n): int(at) for n, _, at in (pair.partition(".") for pair in rest.split("~")[1:])}
        self.epoch = epoch
        if self.order is Order.LINEAR:
            if lowest > self.at.get(ALL, lowest):
                self.findings.append(f"told to resume from {token}, beyond {self.at}")
            for writer in self._rows:
                self._discard(writer, lowest)
            self.at = {ALL: lowest}
            return
        known = set(self.numbers.values())
        for writer in {*self._rows, *self.at, *self.numbers}:
            number = self.numbers.get(writer)
            at = lowest if number is None else ahead.get(number, lowest)
            if at > self.at.get(writer, at):
                self.findings.append(f"told to resume {writer} from {at}, beyond {self.at[writer]}")
            self._discard(writer, at)
            if writer in self.at:
                self.at[writer] = at
        if unknown := ahead.keys() - known:
            self.findings.append(f"told to resume writers by numbers that it never had: {unknown}")
        if not self.at or min(self.at.values()) > lowest:
            # Its writers alone would make a higher token than the one that it was told.
            self.at = {name: self.at.get(name, lowest) for name in self.numbers}

    # --- lines ---

    def writers(self, epoch: str, numbers: dict[str, int]) -> None:
        """A line WRITERS; sets of up to 1,000 writers come whole."""
        self.epoch = epoch
        self.numbers.update(numbers)
        self._listed = (self._listed or set()) | numbers.keys()
        self._no_torn_batch("WRITERS")

    def position(self, writer: str, previous: int, new: int) -> None:
        """A line POSITION."""
        self._no_torn_batch("POSITION")
        if self._listed is not None:
            if self.order is Order.NAMED:
                self.at = {name: at for name, at in self.at.items() if name in self._listed}
            self._listed = None
        have = self.at.get(writer)
        if have is None:
            self._base.setdefault(writer, min(previous, new) if self.order is Order.PLAIN else BEFORE_ALL)
        elif previous != have and (writer in self._placed or previous > have):
            self.findings.append(f"POSITION {writer} {previous} {new} where it had {have}")
        if have is not None and new < have:
            self.counts["moved back"] += 1
            for name in [*self._rows] if writer == ALL and self.order is Order.LINEAR else [writer]:
                self._discard(name, new)
            if self.order is Order.NAMED:  # writers that are not listed stand at the minimum of those that are
                lowest = min({**self.at, writer: new}.values())
                for name in self._rows.keys() - self.at.keys():
                    self._discard(name, lowest)
        self.at[writer] = new
        self._placed.add(writer)
        if self.order is Order.NAMED and writer not in self.numbers and new >= previous:  # it may be taken back
            self.findings.append(f"POSITION of {writer}, to whom WRITERS gave no number")

    def row(self, writer: str, token: str, text: str) -> None:
        """A line RDATA; rows are [id, body] or [id, writer, body]."""
        fields = json.loads(text)
        row = (writer, int(fields[0]), str(fields[-1]))
        if len(fields) == 3 and fields[1] != writer:
            self.findings.append(f"a row of {fields[1]} came as one of {writer}: {text}")
        if self._batch and self._batch[-1][:2] != row[:2]:
            self.findings.append(f"within a batch of {self._batch[-1][:2]} came a row of {row[:2]}")
            self._batch.clear()
        self._batch.append(row)
        if token == "batch":
            return
        if int(token) != row[1]:
            self.findings.append(f"token {token} on a row with id {row[1]}")
        batch, self._batch = self._batch, []
        key = ALL if self.order is Order.LINEAR else writer
        have = self.at.get(key)
        bodies = [body for _, _, body in batch]
        if have is not None and row[1] <= have:
            again = self._rows[writer].get(row[1]) == bodies
            self.findings.append(f"{'repeated' if again else 'out of order'}: {row[:2]} though it had {key} {have}")
        self._rows[writer][row[1]] = bodies
        if key in self.at:  # rows of writers that are not listed move nothing
            self.at[key] = row[1]

    def _discard(self, writer: str, above: int) -> None:
        rows = self._rows[writer]
        for one in [one for one in rows if one > above]:
            del rows[one]
            self.counts["discarded"] += 1
        if writer in self._base:
            self._base[writer] = min(self._base[writer], above)

    def _no_torn_batch(self, what: str) -> None:
        if self._batch:
            self.findings.append(f"{what} within a batch of {self._batch[-1][:2]}")
            self._batch.clear()

    # --- the end ---

    def compare(self, table: Iterable[Row]) -> Difference:
        """What differs from the rows of the table."""
        there = {row for row in table if self._expects(row)}
        have = {
            (writer, one, body)
            for writer, rows in self._rows.items()
            for one, bodies in rows.items()
            for body in bodies
            if self._expects((writer, one, body))
        }
        return Difference(tuple(sorted(there - have)), tuple(sorted(have - there)))

    def _expects(self, row: Row) -> bool:
        if self.order is not Order.PLAIN:
            return True
        base = self._base.get(row[0])
        return base is not None and row[1] > base


def _some(rows: tuple[Row, ...]) -> str:
    """`w1 4..9,12` for rows, by writer."""
    found = []
    for writer in dict.fromkeys(writer for writer, _, _ in rows):
        ids = sorted({one for name, one, _ in rows if name == writer})
        spans: list[list[int]] = []
        for one in ids:
            if spans and spans[-1][1] == one - 1:
                spans[-1][1] = one
            else:
                spans.append([one, one])
        words = [f"{a}..{b}" if a < b else str(a) for a, b in spans]
        found.append(f"{writer} {','.join(words[:8])}{',...' if len(words) > 8 else ''}")
    return f"({'; '.join(found)})" if found else ""
