"""Lines of the protocol as server-sent events (https://html.spec.whatwg.org/#server-sent-events). Does no I/O.

The id of an event is the token to go on with after it, so a browser that connects again resumes by itself. A row has
no name, so `onmessage` gets it; other events have one: `position`, `reset`, `notice`, `refused`. What a row moves is
decided by the state of our clients (`client/progress`).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from replicad.client.follower import UNKNOWN, StreamProgress
from replicad.client.refusals import is_notice, refusal
from replicad.errors import TokenForked
from replicad.operations.http.problems import Problem, problem_of_text
from replicad.operations.http.row_json import row_json
from replicad.protocol.tokens import Vector
from replicad.streams.commands import Position, Writers

LONGEST_ID = 2048  # characters: browsers send it back in a header. Of many writers, some rows may come again
SHARED = 16  # translated blocks that are kept for other readers of the same rows
SHARED_BYTES = 256 << 10  # of a block; a chunk of a journal has half of it. Blocks of longer rows are kept while sent
OPENING = b"retry: 2000\n\n"  # ms until a browser connects again
PING = b": ping\n\n"

State = tuple[str | None, tuple[tuple[str, int], ...]]  # the token of a reader, and the listed writers
_Key = tuple[bytes | int, State]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Translated:
    """A block of lines as events, and what it does to a reader."""

    block: bytes | bytearray
    events: bytes
    moved: tuple[tuple[str, int], ...] = ()
    after: State | None = None


class Translations:
    """Blocks that were translated for one reader, for others that are in the same state."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Key, Translated] = OrderedDict()
        self._in_use: WeakValueDictionary[_Key, Translated] = WeakValueDictionary()

    def find(self, block: bytes | bytearray, state: State) -> Translated | None:
        """What was put. Readers have the same object."""
        return self._in_use.get(_key(block, state))

    def put(self, state: State, found: Translated) -> None:
        """Keep it as long as somebody sends it; a short one for a while longer."""
        key = _key(found.block, state)
        self._in_use[key] = found
        if len(found.block) <= SHARED_BYTES:
            self._kept[key] = found
            if len(self._kept) > SHARED:
                self._kept.popitem(last=False)


def _key(block: bytes | bytearray, state: State) -> _Key:
    """A long block is not looked at again; nothing else has its id while it is kept."""
    return (bytes(block) if len(block) <= SHARED_BYTES else id(block)), state


class Events:
    """One reader of one stream.

    `started`: the subscription was accepted. `problem`: why it was not. `over`: nothing more will come. `again`: the
    token to subscribe with once more, because the history has forked.
    """

    def __init__(self, stream: str, token: str, translations: Translations) -> None:
        """Raises BadToken: `token` is no token, nor NOW or EARLIEST."""
        self.started = self.over = False
        self.problem: Problem | None = None
        self.again: str | None = None
        self._translations = translations
        self._progress = StreamProgress(stream, token, linear=False)
        self._rdata = f"RDATA {stream} ".encode()
        self._state: State | None = None  # computed when it is needed
        self._writers: tuple[tuple[str, int], ...] = ()
        self._single, self._prefix = b"", b""  # the only listed writer, and what stands before its tokens in ids

    def feed(self, block: bytes | bytearray) -> Translated:
        """Take whole lines, which stay as they are, and give their `events`. Readers of a long row share these."""
        if self.over:
            return Translated(block, b"")
        if not (self.started and block.startswith(self._rdata)):
            return self._translate(block)
        before = self._state = self._state or (self._progress.token(), self._writers)
        found = self._translations.find(block, before)
        if found is None:
            return self._translate(block, before)
        for instance, at in found.moved:
            self._progress.mark(instance).at = at
        self._state = found.after
        return found

    def _translate(self, block: bytes | bytearray, before: State | None = None) -> Translated:
        """`before`: the state, if the result is to be kept for others: a block of rows alone."""
        events: list[bytes] = []
        moved: dict[bytes, int] = {}
        self._state = None
        for line in bytes(block).split(b"\n")[:-1]:
            if line.startswith(self._rdata):
                events.append(self._row(line, moved))
                continue
            before = None
            events.append(self._other(line))
            if self.over:  # positions behind this line count for who got the rows, which this reader asks for again
                break
        if before is None:
            return Translated(block, b"".join(events))
        self._state = (self._progress.token(), self._writers)
        ended = tuple((instance.decode(), at) for instance, at in moved.items())
        found = Translated(block, b"".join(events), ended, self._state)
        self._translations.put(before, found)
        return found

    def _row(self, line: bytes, moved: dict[bytes, int]) -> bytes:
        _, _, instance, token, row = line.split(b" ", 4)
        data = row_json(instance, token, row)
        if token == b"batch":
            return b"data: %s\n\n" % data
        at = int(token)
        mark = self._progress.mark(instance.decode())
        if at > mark.at:
            moved[instance] = mark.at = at
        if instance == self._single:
            return b"id: %s%s\ndata: %s\n\n" % (self._prefix, token, data)
        return b"%sdata: %s\n\n" % (self._id(), data)

    def _other(self, line: bytes) -> bytes:
        name, _, arguments = line.decode().partition(" ")
        match name:
            case "PING":
                return PING if self.started else b""
            case "POSITION" if self.started:
                return self._position(Position.parse(arguments))
            case "WRITERS":
                return self._set_writers(Writers.parse(arguments))
            case "ERROR":
                return self._error(arguments)
        return b""

    def _position(self, received: Position) -> bytes:
        progress = self._progress
        progress.position_received()
        mark = progress.mark(received.instance)
        if received.new < mark.at:
            instance = progress.move_back(received.instance, received.new)
            self._note_single()
            return self._resets([(instance, received.new)])
        if mark.at != UNKNOWN and received.prev > mark.at:  # rows between the two did not come: they come again
            self.over = True
            return b""
        mark.at = received.new
        self._note_single()
        return self._event("position", instance=received.instance, prev=received.prev, new=received.new)

    def _set_writers(self, received: Writers) -> bytes:
        progress = self._progress
        events = b""
        if progress.is_forked(received.epoch):
            back, again = progress.begin_generation(received.epoch)
            events = self._resets(back)
            self.over = self.over or again  # rows that are void do not come again on this connection
        self.started = progress.answered = True
        progress.set_writers(received.epoch, dict(received.numbers))
        self._writers = tuple(progress.writers.items())
        self._note_single()
        return events

    def _note_single(self) -> None:
        """Ids of a stream with one writer are written without a look at positions."""
        self._single = b""
        if len(self._writers) == 1 and self._writers[0][0] in self._progress.positions():
            self._single = self._writers[0][0].encode()
            self._prefix = f"{self._progress.epoch}!".encode()

    def _error(self, text: str) -> bytes:
        error = refusal(text)
        problem = problem_of_text(text)
        if isinstance(error, TokenForked):
            back = self._progress.rewind(Vector.parse(error.rewind))
            self.started, self.again = True, self._progress.token()
            return self._resets(back)
        if is_notice(error):
            return self._event("notice", **problem.fields) if self.started else b""
        if not self.started:
            self.problem = self.problem or problem
            return b""
        self.over = True
        return self._event("refused", **problem.fields)

    def _resets(self, back: Iterable[tuple[str | None, int]]) -> bytes:
        """Rows above a position are void: rows of one writer, or of all (null)."""
        token = self._progress.token(LONGEST_ID)
        events = (
            self._event("reset", instance=instance, discard_after=position, token=token) for instance, position in back
        )
        return b"".join(events)

    def _event(self, name: str, **fields: object) -> bytes:
        data = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        return b"%sevent: %s\ndata: %s\n\n" % (self._id(), name.encode(), data.encode())

    def _id(self) -> bytes:
        """The line of the id; none as long as there is no position."""
        token = self._progress.token(LONGEST_ID)
        return b"" if token in (None, "NOW", "EARLIEST") else f"id: {token}\n".encode()
