"""The backlog of a downstream that fails: a tube of its own, into which the touches that it lacks are put.

So the other downstreams go on, and their pods are acked. The backlog is in the database of the source and survives
the process. When the downstream works again, its thread empties it first. Ids of rows that the downstream refuses are
parked there too, so that the other downstreams get them: `replicad tubes parked list TUBE_DOWNSTREAM`.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from replicad.eventlog import get_logger
from replicad.protocol.tokens import START, Cursor
from replicad.spark.arrow import PodReader
from replicad.spark.database import literal, patiently, quote
from replicad.spark.enrich import listed
from replicad.spark.holding import WHOLE, TubeHold
from replicad.spark.local.config import LocalConfig
from replicad.spark.local.touchlog import ID_BYTES, TouchChunk, ids_to_read
from replicad.spark.options import SourceOptions, endpoint_of, parse_options
from replicad.spark.parking import RefusedIds

READ_PODS, READ_IDS = 5_000, 50_000  # in one piece
AT_ONCE = 50_000  # ids in one statement

log = get_logger("replicad.spark")


def backlog_tube(config: LocalConfig, downstream: str) -> str:
    """The name of the tube."""
    return f"{config.tube}_{downstream}"


class Backlog:
    """The tube `TUBE_DOWNSTREAM`. The main thread adds, the thread of the downstream takes."""

    def __init__(self, config: LocalConfig, downstream: str) -> None:
        self.tube = backlog_tube(config, downstream)
        self._config = config
        self._downstream = downstream
        self._lock = threading.Lock()
        self._used: bool | None = None if len(config.downstreams) > 1 else False  # None: not known
        self._made = False
        self._weight = 0  # of its ids, see touchlog.py
        self._full = False
        self._hold: TubeHold | None = None
        self._cursor: Cursor = START
        self._number = 0
        self._last: TouchChunk | None = None

    @property
    def is_used(self) -> bool:
        """Whether it may have touches."""
        if self._used is None:
            self._used, self._weight = self._look()
            self._made = self._used
        return self._used

    @property
    def term(self) -> int:
        """Of the lease on it."""
        return self._held().term()

    def look_again(self) -> None:
        """Look whether it has touches, which another process may have put there."""
        if self._used is False and len(self._config.downstreams) > 1:
            self._used = None

    def may_grow(self) -> bool:
        """Whether touches may be added. At its bound, in ids and so in bytes, the others wait for this downstream."""
        full = self._weight >= self._config.backlog_ids
        if full and not self._full:
            log.error(
                "backlog_full",
                downstream=self._downstream,
                ids=self._weight,
                hint="the other downstreams wait until this one works; or take it out of the file",
            )
        self._full = full
        return not full

    def add(self, chunk: TouchChunk) -> None:
        """Put the ids and the control pods of a chunk into it."""
        with self._lock:
            if not self._used:
                log.warning("backlog_begins", downstream=self._downstream, tube=self.tube)
            self._make()
            self._used = True
            statements = []
            for shard in pc.unique(chunk.touches.column("shard")).to_pylist():
                of_shard = chunk.touches.filter(pc.equal(chunk.touches.column("shard"), shard))
                ids = of_shard.column("id").combine_chunks()
                for at in range(0, len(ids), AT_ONCE):
                    statements.append(self._touch(shard, listed(ids[at : at + AT_ONCE]), "T"))
            for control in chunk.controls:
                payload = literal(json.dumps(control.payload))
                empty = listed(chunk.touches.column("id").combine_chunks()[:0])
                statements.append(self._touch(control.shard, empty, "B", f"{payload}::jsonb"))
            self._run(statements)
            self._weight += chunk.weight

    def next_chunk(self) -> TouchChunk | None:
        """The next touches; None if it is empty: then nothing is put aside for this downstream any more."""
        hold = self._held()
        while True:
            chunk = self._read(hold.term())
            if chunk is not None:
                return chunk
            with self._lock:
                left, self._weight = self._look()
                if not left:
                    self._used = False
                    log.info("backlog_empty", downstream=self._downstream, tube=self.tube)
                    self._let_go()
                    return None
            threading.Event().wait(0.05)  # the position of the tube is behind its last pod

    def _read(self, term: int) -> TouchChunk | None:
        options = self._options()
        with endpoint_of(options).connect(f"{self._config.name}/backlog"[:255]) as client:
            ids = ids_to_read(self._last, READ_IDS)
            chunks = client.pod_chunks(self.tube, WHOLE, term, self._cursor, limit=READ_PODS, ids=ids, wait=0.2)
            batches = list(PodReader(self.tube, WHOLE, True, options.keys).batches(chunks))
        assert chunks.end is not None
        if chunks.end.cursor == self._cursor:
            return None
        self._number -= 1  # never the number of a chunk of the log
        self._last = TouchChunk.of(self._number, batches, chunks.end.cursor)
        return self._last

    def ack(self, chunk: TouchChunk) -> None:
        """The downstream has a chunk."""
        self._held().ack(WHOLE, self._cursor, chunk.end)
        self._cursor = chunk.end
        self._weight = max(0, self._weight - chunk.weight)

    def park(self, refused: RefusedIds, tries: int) -> None:
        """Keep ids that this downstream refuses, with the reason."""
        with self._lock:
            self._make()
            schema, tube = quote(self._config.tube_schema), literal(self.tube)
            ids = refused.ids
            text = pa.types.is_string(ids.type)
            columns = "'{{}}'::bigint[], {keys}" if text else "{keys}, NULL::text[]"
            self._run(
                [
                    f"INSERT INTO {schema}.tube_parked (tube, seq, op, shard, ids, keys, ts, tries, error) "
                    f"SELECT {tube}, nextval('{schema}.tube_seq'), 'T', {refused.shard}, "
                    f"{columns.format(keys=listed(ids))}, now(), {tries}, {literal(refused.error)}"
                ]
            )

    # --- how ---

    def _options(self) -> SourceOptions:
        source = {name: text for name, text in self._config.options.items() if name.lower() != "tube"}
        return parse_options({**source, "tube": self.tube, "includePayload": "true"}, streaming=True)

    def _held(self) -> TubeHold:
        if self._hold is None:
            self._hold = TubeHold(self._options())
            self._cursor = START
        return self._hold

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold.close()
            self._hold = None

    def close(self) -> None:
        """Release the lease."""
        self._let_go()

    def _make(self) -> None:
        if self._made:
            return
        keys = self._config.source.keys
        self._run(
            [f"SELECT {quote(self._config.tube_schema)}.tube_ensure_exists({literal(self.tube)}, keys => '{keys}')"]
        )
        self._made = True

    def _touch(self, shard: int, ids: str, op: str, payload: str = "NULL") -> str:
        return (
            f"SELECT {quote(self._config.tube_schema)}.{quote(self.tube + '_touch')}({shard}, {ids}, '{op}', {payload})"
        )

    def _run(self, statements: list[str]) -> None:
        def work(driver: Any) -> None:
            with driver.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
            driver.commit()

        patiently(self._config.database, work, transactional=True, patience=30)

    def _look(self) -> tuple[bool, int]:
        """Whether it has pods, and about how many ids; a long one counts as several, as in the log."""
        schema = quote(self._config.tube_schema)
        there = f"SELECT count(*) FROM {schema}.tube_registry WHERE tube = {literal(self.tube)}"

        def work(driver: Any) -> tuple[bool, int]:
            with driver.cursor() as cursor:
                cursor.execute(there)
                if not cursor.fetchone()[0]:
                    return False, 0
                cursor.execute(
                    f"SELECT count(*), coalesce(sum(cardinality(ids)), 0)::bigint, "
                    f"coalesce(sum(octet_length(ids::text)), 0)::bigint FROM {schema}.{quote(self.tube)}"
                )
                pods, ids, size = cursor.fetchone()
                return pods > 0, max(ids, size // ID_BYTES)

        return patiently(self._config.database, work, patience=10)
