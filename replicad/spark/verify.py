"""`replicad pipeline verify CONFIG`: compare the rows of the source with the rows downstream.

This shares no argument with the pipeline: it reads neither pods nor offsets to find out what should be there. Both
sides are read in pages, in the order of the ids, and merged: an id is missing downstream, is there in excess, or its
columns differ. A downstream that has no order (an index, a class of a user) is asked for the ids of each page, and all
its keys are looked up in the source. Rows of the source are compared as the downstream keeps them: after the
transform, and as documents.

The pipeline may run meanwhile. So what differs is looked at again, until it is equal, or is settled: neither before nor
after two looks had the tube a pod with the id, and both looks saw the same row in the source. What is not settled in
time is in flight, and said to be.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from replicad.config.declaring import SECONDS, Key, shown_value
from replicad.errors import DownstreamDiffers, UsageError
from replicad.eventlog import get_logger
from replicad.spark.database import batches_of, forget, literal, patiently, quote
from replicad.spark.enrich import KEYS, PIECE, EnrichedRows, Enricher, conform, listed
from replicad.spark.local.backlog import backlog_tube
from replicad.spark.local.config import LocalConfig, SinkMaker
from replicad.spark.local.tables import TableWork, TubeTable, make_work, tables_of
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.sinks.base import Shape, ordered
from replicad.spark.tables import UNHELD, Layout
from replicad.tubes.keys import BIGINT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = 50_000  # rows of one page, on either side
LAST_PAGE = 1_000  # rows that are asked for downstream, at least, behind the last row of the source
SHOWN = 20  # ids of each kind that a report names
AGAIN = 1.0  # seconds between two looks at what differs
LAST_LOOKS = 10.0  # seconds for ids whose next look may settle them, when the time is over
AT_ONCE = 5_000  # ids that are looked at again in one statement
KEPT = 1_000_000  # ids that may differ; more are not looked at again one by one
_WAIT = Key("wait", SECONDS, 60.0, "how long a difference may be in flight", minimum=0, maximum=86_400)
MISSING, EXTRA, DIFFERENT = "missing", "extra", "different"

_KEYS = "SELECT keys FROM {schema}.tube_registry WHERE tube = {tube}"
_SHARDS = "SELECT DISTINCT shard::int FROM {schema}.tube_attachment WHERE tube = {tube} ORDER BY 1"
_TUBE = "SELECT count(*) FROM {schema}.tube_registry WHERE tube = {tube}"
_OF_SHARD = "SELECT count(*) FROM {schema}.{tube} WHERE shard = {shard}"
_BUSY = "SELECT count(*) FROM {schema}.tube_backfill WHERE tube = {tube} AND NOT finished"
_PREDICATES = """
SELECT {schema}.tube_where(t.predicate, a.predicate), array_to_string(ARRAY(SELECT quote_ident(n::text) FROM
  unnest(a.path) n), ', ')
FROM {schema}.tube_attachment a JOIN {schema}.tube_registry t USING (tube)
WHERE a.tube = {tube} AND a.tbl = to_regclass({table}) AND {schema}.tube_where(t.predicate, a.predicate) <> ''"""
_IN_PODS = """
SELECT DISTINCT u.id FROM {schema}.{tube} p CROSS JOIN LATERAL unnest(p.ids) u(id)
WHERE u.id = ANY ({listed}){of_shard}"""

log = get_logger("replicad.spark")


@dataclass(slots=True)
class TableReport:
    """What was found of one table in one downstream. `rows`: of the source, that were compared.

    `missing`, `extra` and `different` have ids; of the last also the columns. `in_flight`: rows that differ, and whose
    pods were not acked in time, or which a backfill that is under way (`backfilling`) may still bring. `unheld`: rows
    of the source that the pipeline cannot carry (docs/types.md). `orphaned`: rows downstream of a shard or a table that
    the source has no more. `uncompared`: why the downstream cannot be read back; empty if it can.
    """

    downstream: str
    table: str
    rows: int = 0
    missing: list[Any] = field(default_factory=list)
    extra: list[Any] = field(default_factory=list)
    different: dict[Any, tuple[str, ...]] = field(default_factory=dict)
    in_flight: int = 0
    backfilling: bool = False
    unheld: int = 0
    orphaned: int = 0
    touched: int = 0
    purged: bool = False
    uncompared: str = ""

    @property
    def differing(self) -> int:
        """Rows that differ and are not in flight."""
        return len(self.missing) + len(self.extra) + len(self.different) + self.orphaned

    def as_dict(self) -> dict[str, Any]:
        """For JSON: counts, and some ids of each kind."""
        return {
            "downstream": self.downstream,
            "table": self.table,
            "compared": not self.uncompared,
            "rows": self.rows,
            **{kind: len(getattr(self, kind)) for kind in (MISSING, EXTRA, DIFFERENT)},
            "orphaned": self.orphaned,
            "in_flight": self.in_flight,
            "backfilling": self.backfilling,
            "unheld": self.unheld,
            "touched": self.touched,
            "purged": self.purged,
            "examples": {
                MISSING: self.missing[:SHOWN],
                EXTRA: self.extra[:SHOWN],
                DIFFERENT: {str(id_): list(names) for id_, names in list(self.different.items())[:SHOWN]},
            },
        }


@dataclass(frozen=True, slots=True)
class Transform:
    """What a transform does with rows of the source. `shape`: the shape of its result."""

    shape: Callable[[Enricher], Shape]
    rows: Callable[[Shape, pa.Table], pa.Table]


def as_local(config: PipelineConfig) -> LocalConfig:
    """The pipeline of Spark as one of the local engine, to read with."""
    return LocalConfig(
        options=config.source_options,
        database=config.database,
        checkpoint=Path(),  # nothing is read or written there
        downstreams={"downstream": SinkMaker("spark", lambda _schema, _table: config.sink)},
        rules=config.rules,
        key=config.key,
        columns=config.columns,
        renamed=config.renamed,
        numeric=config.numeric,
        out_of_range=config.out_of_range,
        tube_schema=config.tube_schema,
        exact=config.transform is None,
    )


def transform_of(config: PipelineConfig, spark: SparkSession) -> Transform:
    """The transform of a pipeline of Spark. It gets the rows in pages, with 0 as `_seq`."""
    from replicad.spark.batches import transform_changes  # noqa: PLC0415 - needs Spark
    from replicad.spark.pipeline import shape_of  # noqa: PLC0415 - likewise

    transform = config.transform
    assert transform is not None

    def rows(shape: Shape, page: pa.Table) -> pa.Table:
        return transform_changes(spark, transform, shape, EnrichedRows(page, shape.keys.empty_table())).writes

    return Transform(lambda enricher: shape_of(config, spark, enricher, enricher.layout.known), rows)


def verify(
    config: LocalConfig,
    *,
    sample: float = 1.0,
    wait: float = 60.0,
    repair: bool = False,
    chance: random.Random | None = None,
    transform: Transform | None = None,
) -> list[TableReport]:
    """Compare every table of every downstream. `sample`: the share of the pages that are compared, above 0 to 1.

    `wait`: seconds for which what differs may be in flight. `repair`: touch the ids that differ, so that the pipeline
    writes them again, and purge shards that have no table.

    Raises:
        UsageError: a downstream cannot be read, or has another form than the source.
        DatabaseError, DownstreamError: one side cannot be used.
    """
    found = _Audit(config, sample, wait, chance or random.Random(), transform)  # noqa: S311
    found.run()
    if repair:  # not before: what is touched is in flight for the other downstreams
        found.repair()
    return found.reports


def works_of(config: LocalConfig) -> Iterator[TableWork]:
    """Every table of every downstream, to be looked at and not changed."""
    keys = _keys_of(config)
    for name in config.downstreams:
        for table in _chosen_tables(config):
            yield make_work(config, name, table, keys, prepare=False)


def _chosen_tables(config: LocalConfig) -> list[TubeTable | None]:
    return [None] if config.tables is None else [table for table in _tables(config) if table.attached]


def _tables(config: LocalConfig) -> list[TubeTable]:
    """The tables of the tube that the file chooses, also those that are not attached any more."""
    assert config.tables is not None
    chosen = config.tables.chooses
    return [table for table in tables_of(config).values() if chosen(table.plain)]


def _keys_of(config: LocalConfig) -> str:
    """The kind of the tube's ids."""
    rows = _ask(config.database, _KEYS.format(schema=quote(config.tube_schema), tube=literal(config.tube)))
    if not rows.num_rows:
        raise UsageError(f"the database has no tube {config.tube}; is it the database of the daemon's tube?")
    return str(rows.column(0)[0].as_py())


def share(text: str) -> float:
    """A share from `1%` or `0.01`. Raises UsageError."""
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise UsageError(f"--sample: {shown_value(text)} is not valid; give a share such as 1% or 0.01")
    return found


def wait_of(text: str) -> float:
    """Seconds from `60s` or `60`. Raises UsageError."""
    return float(_WAIT.take(text, "--wait"))


def raise_if_different(reports: Iterable[TableReport]) -> None:
    """Raises DownstreamDiffers with the sums, if some rows differ, or are in flight: then they are not known.

    Raises:
        UsageError: no row differs, but a downstream could not be compared.
    """
    reports = list(reports)
    found = [report for report in reports if report.differing]
    if not found:
        in_flight = sum(report.in_flight for report in reports)
        if in_flight:
            raise DownstreamDiffers(
                f"{in_flight:,} rows differ and are in flight: their pods were not acked within --wait, or a backfill "
                "is under way; is the pipeline running? Verify again when the tube is empty (replicad tubes stats)"
            )
        left_out = {report.downstream: report.uncompared for report in reports if report.uncompared}
        if left_out:
            why = "; ".join(f"{downstream}: {reason}" for downstream, reason in left_out.items())
            raise UsageError(
                f"downstream {', '.join(left_out)} cannot be compared, so it is not known to be equal: {why}"
            )
        return
    sums = {kind: sum(len(getattr(report, kind)) for report in found) for kind in (MISSING, EXTRA, DIFFERENT)}
    sums["of no table"] = sum(report.orphaned for report in found)
    counts = ", ".join(f"{number:,} {kind}" for kind, number in sums.items() if number)
    where = ", ".join(dict.fromkeys(f"{report.table} in {report.downstream}" for report in found[:5]))
    mended = any(report.touched or report.purged for report in found)
    left = [report for report in found if report.orphaned and not report.purged]
    remedies = []
    if mended:
        remedies.append("they were touched: when the pipeline has written them, verify again")
    elif len(left) < len(found):
        remedies.append("run it again with --repair, which touches them so that the pipeline writes them again")
    remedies += dict.fromkeys(_remedy(report) for report in left)
    raise DownstreamDiffers(f"rows differ ({counts}): {where}; {'; '.join(remedies)}")


def _remedy(report: TableReport) -> str:
    """For rows of a table that the source has no more."""
    if report.table.startswith("shard "):
        return "run it again with --repair, which purges shards without a table (replicad tubes purge)"
    return f"the source has no {report.table} any more, so nothing keeps it: drop it in {report.downstream} too"


def _attached_shards(config: LocalConfig) -> list[int]:
    """The shards of the tube that some table is attached with."""
    rows = _ask(config.database, _SHARDS.format(schema=quote(config.tube_schema), tube=literal(config.tube)))
    return [int(shard) for shard in rows.column(0).to_pylist()]


def _shards(known: Sequence[int], layout: Layout, table: TubeTable | None) -> list[tuple[int, ...]]:
    """The shards that are compared one by one, or together, because one table has the rows of all."""
    if table is not None:
        return [(table.shard,)]
    if all("{shard" not in source.rule.table for source in layout.sources):
        if len(layout.sources) > 1:
            raise UsageError("several tables without {shard} in their names cannot be told apart downstream")
        return [tuple(known)]
    return [(shard,) for shard in known if layout.query(shard) is not None]


def _table_of(layout: Layout, shards: Sequence[int]) -> str:
    located = layout.located(shards[0] if shards else 0)
    assert located is not None, "the shards are of the layout"
    return located[1]


@dataclass(slots=True)
class _Audit:
    """One run of `verify`."""

    config: LocalConfig
    sample: float
    wait: float
    chance: random.Random
    transform: Transform | None
    reports: list[TableReport] = field(default_factory=list)
    _done: list[_Comparison] = field(default_factory=list)
    _orphans: list[tuple[TableReport, int]] = field(default_factory=list)
    _known: list[int] = field(default_factory=list)  # the shards with a table

    def run(self) -> None:
        """Compare everything."""
        config = self.config
        keys = _keys_of(config)
        self._known = _attached_shards(config)
        for name in config.downstreams:
            for table in _chosen_tables(config):
                work = make_work(config, name, table, keys, prepare=False)
                if self.transform is not None:
                    work = replace(work, shape=self.transform.shape(work.enricher))
                if why := work.sink.unread:
                    self.reports.append(TableReport(name, work.name, uncompared=why))
                else:
                    self._compare(name, work, table)
            for table in () if config.tables is None else _tables(config):
                if not table.attached:
                    self._look_at_the_rest(name, table)

    def _compare(self, name: str, work: TableWork, table: TubeTable | None) -> None:
        """One table in one downstream, or all tables of its shards."""
        checked = []
        for shards in _shards(self._known, work.enricher.layout, table):
            title = work.name if table is not None else _table_of(work.enricher.layout, shards)
            report = TableReport(name, title)
            checked.append(_Comparison(self, work, shards, report))
            self.reports.append(report)
        self._done += checked
        pages = work.sink.stored_keys(work.shape)
        for one in checked:
            one.read(self.sample, in_order=pages is None)
        orphans: dict[int | None, int] = {}
        if pages is None:
            orphans = dict(work.sink.stored_counts() or {})
        else:
            by_shard = {shard: one for one in checked for shard in one.shards}
            for page in pages:
                skip = self.sample < 1 and self.chance.random() >= self.sample
                for shard in pc.unique(page.column("_shard")).to_pylist():
                    ids = page.filter(pc.equal(page.column("_shard"), shard)).column(work.shape.id).combine_chunks()
                    if shard not in by_shard:
                        orphans[shard] = orphans.get(shard, 0) + len(ids)
                    elif not skip:
                        by_shard[shard].check_keys(ids)
        for one in checked:
            one.settle(self.wait)
        for shard, count in sorted((shard, count) for shard, count in orphans.items() if shard is not None):
            if shard not in self._known and count:
                self._note_orphans(name, f"shard {shard}, which has no table", shard, count)

    def _look_at_the_rest(self, name: str, table: TubeTable) -> None:
        """A table that is not attached any more: what the downstream still has of it."""
        counts = self.config.downstreams[name].make(*table.parts).stored_counts()
        if counts is None:
            self.reports.append(TableReport(name, table.name, uncompared="its rows cannot be counted"))
        elif count := sum(number for shard, number in counts.items() if shard in (None, table.shard)):
            self._note_orphans(name, table.name, table.shard, count)

    def _note_orphans(self, name: str, title: str, shard: int, count: int) -> None:
        """Rows of a shard without a table: they are in flight while the tube has pods of the shard."""
        report = TableReport(name, title)
        waiting = 0
        for tube in _tubes(self.config, name):
            sql = _OF_SHARD.format(schema=quote(self.config.tube_schema), tube=quote(tube), shard=shard)
            waiting += _ask(self.config.database, sql).column(0)[0].as_py()
        if waiting:
            report.in_flight = count
        else:
            report.orphaned = count
            self._orphans.append((report, shard))
        self.reports.append(report)

    def repair(self) -> None:
        """Touch what differs. Shards without a table are purged, if the pipeline is one of shards."""
        for checked in self._done:
            checked.repair()
        config = self.config
        schema, touch = quote(config.tube_schema), quote(config.tube + "_touch")
        empty = "'{}'::text[]" if _keys_of(config) != BIGINT else "'{}'::bigint[]"
        purged: set[int] = set()
        for report, shard in self._orphans if config.tables is None else ():
            report.purged = True
            if shard in purged:
                continue
            purged.add(shard)
            start = _ask(config.database, f"SELECT {schema}.tube_backfill_step1()").column(0)[0].as_py()
            _ask(config.database, f"SELECT {schema}.tube_backfill_step2()::text")
            payload = literal(json.dumps({"type": "backfill_end", "start_seq": start, "purge": True}))
            _ask(config.database, f"SELECT {schema}.{touch}({shard}, {empty}, 'B', {payload}::jsonb)::text")


@dataclass(frozen=True, slots=True)
class _Page:
    """Rows of the source. `rows`: as the downstream should have them. `unheld`: ids of rows that cannot be carried.

    `ids`: of all rows, also of those that a transform leaves out; `more`: there are rows behind them. `digests`: of
    each row as it is in the source, if they were asked for.
    """

    rows: pa.Table
    unheld: pa.Array
    ids: pa.Array
    more: bool
    digests: Mapping[Any, bytes]

    @property
    def last(self) -> Any:
        """The last id."""
        return self.ids[-1].as_py() if len(self.ids) else None


class _Comparison:
    """One table, or one shard of it, in one downstream."""

    def __init__(self, audit: _Audit, work: TableWork, shards: tuple[int, ...], report: TableReport) -> None:
        self.shards = shards
        self._config = config = audit.config
        self._work = work
        self._report = report
        self._chance = audit.chance
        self._transform = transform = audit.transform
        self._id = work.shape.id
        layout = work.enricher.layout
        located = layout.located(shards[0] if shards else 0)
        assert located is not None, "the shards are of the layout"
        self._url, self._table, self._form = located[0] or config.database, located[1], located[2]
        self._key = self._form.columns[self._id].expression
        self._is_text = pa.types.is_string(work.shape.ids)
        self._order = f'({self._key}) COLLATE "C"' if self._is_text else self._key
        self._predicates: list[tuple[str, str]] | None = None
        self._suspects: dict[Any, tuple[str, ...]] = {}  # the columns that differ, by id; empty: missing or extra
        self._row_bytes = 1
        self._piece = 4  # rows that are transformed together; more when the size of the result is known
        if transform is not None and len(shards) != 1:
            raise UsageError(
                f"the rows of {self._table} are in several shards, and a transform may use `_shard`, so they cannot be "
                "compared with the source"
            )

    def read(self, sample: float, *, in_order: bool) -> None:
        """Compare page after page."""
        after: Any = None
        early: Future[_Page] | None = None
        with ThreadPoolExecutor(1) as ahead:
            while True:
                if sample < 1 and self._chance.random() >= sample:
                    after, more = self._end_of_page(after)
                else:
                    page = self._source_page(after) if early is None else early.result()
                    early = ahead.submit(self._source_page, page.last) if sample >= 1 and page.more else None
                    upto, more = self._compare_page(page, after, in_order=in_order)
                    if early is not None and upto != page.last:
                        early.result()
                        early = None
                    after = upto
                if not more:
                    break
            ahead.submit(forget, self._url).result()

    def check_keys(self, ids: pa.Array) -> None:
        """Keys that are downstream: those without a row in the source are suspects."""
        for at in range(0, len(ids), self._at_once):
            piece = ids[at : at + self._at_once]
            if self._transform is not None:
                page = self._source_of(piece)
                there = pa.concat_arrays([page.rows.column(self._id).combine_chunks(), page.unheld])
            else:
                found = self._form.found.replace("$1", listed(piece))
                rows = _ask(self._url, f"SELECT {self._key} AS id FROM {self._table} WHERE {found}")
                there = rows.column(0).combine_chunks().cast(self._work.shape.ids)
            self._suspect(dict.fromkeys(piece.filter(pc.invert(pc.is_in(piece, value_set=there))).to_pylist(), ()))

    def repair(self) -> None:
        """Touch the ids that differ."""
        report = self._report
        ids = [*report.missing, *report.extra, *report.different]
        if not ids:
            return
        if len(self.shards) != 1:
            raise UsageError(
                f"the rows of {self._table} are in several shards, so which one a missing row is in is not known; "
                f"touch them yourself: SELECT {self._config.tube_schema}.{{table}}_touch(...) (docs/sql.md)"
            )
        call = f"{quote(self._config.tube_schema)}.{quote(self._config.tube + '_touch')}"
        for piece in _pieces(ids, AT_ONCE):
            _ask(self._config.database, f"SELECT {call}({self.shards[0]}, {listed(self._array(piece))}, 'T')")
        report.touched = len(ids)

    # --- pages ---

    def _compare_page(self, page: _Page, after: Any, *, in_order: bool) -> tuple[Any, bool]:
        """Compare a page of the source. Returns the id up to which that was done, and whether more follows."""
        source, unheld, ids = page.rows, page.unheld, page.ids
        upto = page.last if page.more else None
        if in_order:
            limit = len(ids) if page.more else max(len(ids), LAST_PAGE)
            found = self._downstream(after=after, limit=limit)
            if found.num_rows >= limit:
                end = found.column(self._id)[-1].as_py()
                upto = end if upto is None else min(upto, end)
            if upto is not None:
                bound = pa.scalar(upto, self._work.shape.ids)
                source, found = (one.filter(pc.less_equal(one.column(self._id), bound)) for one in (source, found))
                unheld, ids = (one.filter(pc.less_equal(one, bound)) for one in (unheld, ids))
            self._suspect(self._differences(source, unheld, found))
        else:
            nothing = source.slice(0, 0)
            self._suspect(self._differences(nothing, unheld, self._downstream(ids=unheld)))
            for at in range(0, source.num_rows, self._at_once):
                piece = source.slice(at, self._at_once)
                found = self._downstream(ids=piece.column(self._id).combine_chunks())
                self._suspect(self._differences(piece, unheld[:0], found))
        self._report.rows += len(ids)
        self._report.unheld += len(unheld)
        return upto, upto is not None

    def _suspect(self, found: Mapping[Any, tuple[str, ...]]) -> None:
        for id_, names in found.items():
            if len(self._suspects) >= KEPT:
                raise DownstreamDiffers(
                    f"more than {KEPT:,} rows of {self._table} differ in {self._report.downstream}; back it up by a "
                    "backfill: replicad tubes backfill"
                )
            self._suspects[id_] = names

    def _differences(self, source: pa.Table, unheld: pa.Array, found: pa.Table) -> dict[Any, tuple[str, ...]]:
        """The ids of one side only, and the ids whose columns differ, with the names of these."""
        ids, theirs = source.column(self._id).combine_chunks(), found.column(self._id).combine_chunks()
        known = pa.concat_arrays([ids, unheld])
        alone = known.filter(pc.invert(pc.is_in(known, value_set=theirs)))
        extra = theirs.filter(pc.invert(pc.is_in(theirs, value_set=known)))
        suspects: dict[Any, tuple[str, ...]] = dict.fromkeys([*alone.to_pylist(), *extra.to_pylist()], ())
        if len(theirs) != len(pc.unique(theirs)):  # the row of one id in several shards
            counted = pc.value_counts(theirs)
            twice = counted.filter(pc.greater(counted.field("counts"), 1)).field("values")
            suspects |= dict.fromkeys(twice.to_pylist(), ("_shard",))
            found = found.filter(pc.invert(pc.is_in(theirs, value_set=twice)))
            theirs = found.column(self._id).combine_chunks()
        source = source.filter(pc.is_in(ids, value_set=theirs))
        found = found.filter(pc.is_in(theirs, value_set=ids))
        names: dict[int, list[str]] = {}
        for name in self._compared:
            for at in _unequal(source.column(name), found.column(name)):
                names.setdefault(at, []).append(name)
        compared = source.column(self._id)
        return suspects | {compared[at].as_py(): tuple(columns) for at, columns in names.items()}

    @property
    def _compared(self) -> list[str]:
        return [name for name in self._work.shape.schema.names if name not in (self._id, "_shard", "_seq")]

    @property
    def _at_once(self) -> int:
        """How many rows, by their size, are looked at together."""
        return max(1, min(AT_ONCE, PIECE // self._row_bytes))

    def _source_page(self, after: Any) -> _Page:
        """The rows behind an id: at most `PAGE`, and about `PIECE` bytes."""
        condition = "true" if after is None else f"{self._order} > {self._literal(after)}"
        sql = self._form.select(self._table, f"{condition} ORDER BY {self._order} LIMIT {PAGE}")
        rows, whole = _first(self._url, sql, PIECE)
        return self._page(rows, more=not whole or rows.num_rows >= PAGE, cut=True)

    def _source_of(self, ids: pa.Array, *, digests: bool = False) -> _Page:
        """The rows with these ids, in the order of their ids."""
        rows = _ask(self._url, self._form.select(self._table, self._form.found.replace("$1", listed(ids))))
        return self._page(rows, more=False, digests=digests)

    def _page(self, rows: pa.Table, *, more: bool, cut: bool = False, digests: bool = False) -> _Page:
        """Rows as they were read from the source, as the downstream should have them.

        `cut`: the page may end earlier, if a transform makes rows long.
        """
        shape, enricher = self._work.shape, self._work.enricher
        fields = list(enricher.layout.schema)
        fields += [pa.field(UNHELD, pa.string())] if UNHELD in rows.column_names else []
        rows = ordered(conform(rows, pa.schema(fields)), self._id)
        self._measure(rows)
        ids = rows.column(self._id).combine_chunks()
        noted = {row[self._id]: _digest(row) for row in rows.to_pylist()} if digests else {}
        unheld = pa.array([], shape.ids)
        if UNHELD in rows.column_names:
            carried = pc.is_null(rows.column(UNHELD))
            unheld = rows.filter(pc.invert(carried)).column(self._id).combine_chunks()
            rows = rows.filter(carried).drop_columns([UNHELD])
        if self._transform is not None:
            rows, last = self._transformed(rows, cut=cut)
            if last is not None:
                ids, unheld = (one.filter(pc.less_equal(one, pa.scalar(last, shape.ids))) for one in (ids, unheld))
                more = True
        rows = self._work.sink.as_stored(shape, rows.select([self._id, *self._compared]))
        return _Page(rows, unheld, ids, more, noted)

    def _measure(self, rows: pa.Table) -> None:
        if rows.num_rows:
            self._row_bytes = max(self._row_bytes, rows.nbytes // rows.num_rows)

    def _transformed(self, rows: pa.Table, *, cut: bool) -> tuple[pa.Table, Any]:
        """The rows after the transform, in pieces whose results are bounded.

        With `cut` it ends when it has about `PIECE` bytes, and returns the last id before; None: all rows were taken.
        """
        assert self._transform is not None
        shape = self._work.shape
        for name, number in (("_shard", self.shards[0]), ("_seq", 0)):
            rows = rows.append_column(name, pa.repeat(pa.scalar(number, KEYS.field(name).type), rows.num_rows))
        made, size, at = [shape.schema.empty_table()], 0, 0
        while at < rows.num_rows:
            piece = rows.slice(at, self._piece)
            found = self._transform.rows(shape, piece)
            self._measure(found)
            made.append(found)
            size += found.nbytes
            at += piece.num_rows
            self._piece = max(1, min(4 * piece.num_rows, PIECE // 4 * piece.num_rows // max(1, found.nbytes)))
            if cut and size > PIECE and at < rows.num_rows:
                return ordered(pa.concat_tables(made), self._id), piece.column(self._id)[-1].as_py()
        return ordered(pa.concat_tables(made), self._id), None

    def _downstream(self, *, after: Any = None, limit: int | None = None, ids: pa.Array | None = None) -> pa.Table:
        """Rows of the downstream, in the order of their ids."""
        sink, shape = self._work.sink, self._work.shape
        names = [self._id, *self._compared]
        schema = sink.as_stored(shape, shape.schema.empty_table().select(names)).schema
        shards: Collection[int | None] = self.shards
        if len(self.shards) != 1 and (ids is None or sink.stored_keys(shape) is None):
            shards = [None]
        found = [schema.empty_table()]
        for shard in shards:
            rows = sink.rows(shape, shard, after=after, limit=limit, ids=ids)
            assert rows is not None, "verify asks only downstreams that can be read back"
            found.append(conform(rows, schema))
        return ordered(pa.concat_tables(found), self._id)

    def _end_of_page(self, after: Any) -> tuple[Any, bool]:
        """The last id of a page that is left out, and whether more follows."""
        condition = "true" if after is None else f"{self._order} > {self._literal(after)}"
        sql = (
            f"SELECT {self._key} FROM {self._table} WHERE {condition} ORDER BY {self._order} OFFSET {PAGE - 1} LIMIT 1"
        )
        rows = _ask(self._url, sql)
        return (rows.column(0)[0].as_py(), True) if rows.num_rows else (None, False)

    def _literal(self, id_: Any) -> str:
        return literal(id_) if self._is_text else str(id_)

    def _array(self, ids: Sequence[Any]) -> pa.Array:
        return pa.array(ids, self._work.shape.ids)

    # --- what differs ---

    def settle(self, wait: float) -> None:
        """Look again at what differs, until it is equal or settled, or the time is over."""
        until = time.monotonic() + wait
        before: dict[Any, Any] = {}  # of the row of the source at the last look, of ids without a pod since before it
        while self._suspects:
            kept: dict[Any, Any] = {}
            for piece in _pieces(list(self._suspects), self._at_once):
                busy = self._in_pods(piece)
                ids = self._array(piece)
                page, found = self._source_of(ids, digests=True), self._downstream(ids=ids)
                differing = self._differences(page.rows, page.unheld, found)
                wanted = {*page.rows.column(self._id).to_pylist(), *page.unheld.to_pylist()}
                there = set(found.column(self._id).to_pylist())
                unwanted = self._unwanted([id_ for id_ in differing if id_ in wanted and id_ not in there])
                busy |= self._in_pods(piece)
                for id_ in piece:
                    if id_ not in differing or id_ in unwanted:
                        del self._suspects[id_]
                    elif id_ not in busy:
                        self._suspects[id_] = differing[id_]
                        if id_ in before and before[id_] == page.digests.get(id_):
                            self._note(id_, id_ in wanted, id_ in there, differing[id_])
                            del self._suspects[id_]
                        else:
                            kept[id_] = page.digests.get(id_)
            before = kept
            now = time.monotonic()
            if not self._suspects or now >= until + (LAST_LOOKS if kept else 0):
                break
            time.sleep(AGAIN)
        self._report.in_flight = len(self._suspects)

    def _note(self, id_: Any, in_source: bool, in_downstream: bool, names: tuple[str, ...]) -> None:
        if not in_downstream:
            self._report.missing.append(id_)
        elif not in_source:
            self._report.extra.append(id_)
        else:
            self._report.different[id_] = names

    def _in_pods(self, ids: Sequence[Any]) -> set[Any]:
        """Those of the ids that pods in the tube have, or in the backlog of the downstream; all of them while a
        backfill is under way.
        """
        schema, tube = quote(self._config.tube_schema), literal(self._config.tube)
        busy = _ask(self._config.database, _BUSY.format(schema=schema, tube=tube)).column(0)[0].as_py()
        self._report.backfilling = busy > 0
        if busy:
            return set(ids)
        found: set[Any] = set()
        of_shard = f" AND p.shard = ANY ('{{{','.join(map(str, self.shards))}}}')"
        for name in _tubes(self._config, self._report.downstream):
            sql = _IN_PODS.format(schema=schema, tube=quote(name), listed=listed(self._array(ids)), of_shard=of_shard)
            found |= set(_ask(self._config.database, sql).column(0).to_pylist())
        return found

    def _unwanted(self, ids: Sequence[Any]) -> set[Any]:
        """Those of the ids whose rows do not pass the predicates of the tube, so that they may be missing."""
        if not ids:
            return set()
        if self._predicates is None:
            rows = _ask(
                self._config.database,
                _PREDICATES.format(
                    schema=quote(self._config.tube_schema),
                    tube=literal(self._config.tube),
                    table=literal(self._table),
                ),
            )
            self._predicates = [(row["0"], row["1"]) for row in rows.rename_columns(["0", "1"]).to_pylist()]
        wanted: set[Any] = set(ids)
        for where, path in self._predicates:
            found = self._form.found.replace("$1", listed(self._array(ids)))
            sql = f"SELECT {self._key} FROM {self._table} AS tube_row WHERE {found}{where}"
            wanted &= set(_ask(self._url, sql, path=path).column(0).to_pylist())
        return set(ids) - wanted


def _unequal(mine: pa.ChunkedArray, theirs: pa.ChunkedArray) -> Iterator[int]:
    """The places at which two columns of one type and length differ. NULL is equal to NULL, NaN to NaN."""
    if mine.equals(theirs):
        return
    for at, (left, right) in enumerate(zip(mine.to_pylist(), theirs.to_pylist(), strict=True)):
        if left != right and not (left != left and right != right):  # noqa: PLR0124 - NaN
            yield at


def _pieces(ids: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(ids), size):
        yield ids[begin : begin + size]


def _digest(row: Mapping[str, Any]) -> bytes:
    """What is kept of a row, which may be long."""
    return hashlib.blake2b(repr(row).encode(), digest_size=16).digest()


def _tubes(config: LocalConfig, downstream: str) -> list[str]:
    """The tubes with touches that a downstream lacks: that of the pipeline, and its backlog, if there is one."""
    backlog = backlog_tube(config, downstream)
    sql = _TUBE.format(schema=quote(config.tube_schema), tube=literal(backlog))
    there = len(config.downstreams) > 1 and _ask(config.database, sql).column(0)[0].as_py()
    return [config.tube, *([backlog] if there else [])]


def _first(url: str, sql: str, most: int) -> tuple[pa.Table, bool]:
    """The first rows of a statement, about `most` bytes and at least one, and whether these are all rows."""

    def work(driver: Any) -> tuple[pa.Table, bool]:
        held, size = [], 0
        with driver.cursor() as cursor:
            cursor.execute(sql)
            reader = batches_of(cursor)
            for batch in reader:
                held.append(batch)
                size += batch.nbytes
                if size > most:
                    return pa.Table.from_batches(held, reader.schema), False
            return pa.Table.from_batches(held, reader.schema), True

    found, whole = patiently(url, work)
    if not whole:
        forget(url, transactional=False)  # the rest of the rows is still on its way
    return found, whole


def _ask(url: str, sql: str, *, path: str | None = None) -> pa.Table:
    """The rows of a statement. `path`: the search_path for it alone."""

    def work(driver: Any) -> pa.Table:
        with driver.cursor() as cursor:
            if path is not None:
                cursor.execute(f"SELECT set_config('search_path', {literal(path)}, true)")
                cursor.fetchall()
            cursor.execute(sql)
            reader = batches_of(cursor)
            found = pa.Table.from_batches(list(reader), reader.schema)
        if path is not None:
            driver.rollback()
        return found

    return patiently(url, work, transactional=path is not None)


def summary(report: TableReport) -> str:
    """One line about a table."""
    if report.uncompared:
        return f"{report.downstream}: {report.table}: not compared: {report.uncompared}"
    counts: Mapping[str, int] = {
        "rows": report.rows,
        MISSING: len(report.missing),
        EXTRA: len(report.extra),
        DIFFERENT: len(report.different),
        "downstream and in no table of the source": report.orphaned,
        "in flight (a backfill is under way)" if report.backfilling else "in flight": report.in_flight,
        "not carried": report.unheld,
        "touched": report.touched,
    }
    text = ", ".join(f"{number:,} {name}" for name, number in counts.items() if number or name == "rows")
    text += ", purged" if report.purged else ""
    equal = "" if report.differing else ", the others equal" if report.in_flight or report.unheld else ", equal"
    return f"{report.downstream}: {report.table}: {text}{equal}"
