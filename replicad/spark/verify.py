"""`replicad pipeline verify CONFIG`: compare the rows of the source with the rows downstream.

This shares no argument with the pipeline: it reads neither pods nor offsets to find out what should be there. Both
sides are read in pages, in the order of the ids, and merged: an id is missing downstream, is there in excess, or its
columns differ.

The pipeline may run meanwhile. So what differs is looked at again, until it is equal, or is settled: neither before nor
after two looks had the tube a pod with the id, and both looks saw the same row in the source. What is not settled in
time is in flight, and said to be.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from replicad.config.declaring import SECONDS, Key, shown_value
from replicad.errors import DownstreamDiffers, UsageError
from replicad.eventlog import get_logger
from replicad.spark.database import batches_of, literal, patiently, quote
from replicad.spark.enrich import conform, listed
from replicad.spark.local.config import LocalConfig, SinkMaker
from replicad.spark.local.tables import TableWork, TubeTable, make_work, tables_of
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.sinks.base import Sink
from replicad.spark.tables import UNHELD, Layout

PAGE = 50_000  # rows of one page, on either side
SHOWN = 20  # ids of each kind that a report names
AGAIN = 1.0  # seconds between two looks at what differs
LAST_LOOKS = 10.0  # seconds for ids whose next look may settle them, when the time is over
AT_ONCE = 5_000  # ids that are looked at again in one statement
KEPT = 1_000_000  # ids that may differ; more are not looked at again one by one
_WAIT = Key("wait", SECONDS, 60.0, "how long a difference may be in flight", minimum=0, maximum=86_400)
MISSING, EXTRA, DIFFERENT = "missing", "extra", "different"

_KEYS = "SELECT keys FROM {schema}.tube_registry WHERE tube = {tube}"
_SHARDS = "SELECT DISTINCT shard::int FROM {schema}.tube_attachment WHERE tube = {tube} ORDER BY 1"
_BUSY = "SELECT count(*) FROM {schema}.tube_backfill WHERE tube = {tube} AND NOT finished"
_PREDICATES = """
SELECT {schema}.tube_where(t.predicate, a.predicate), array_to_string(ARRAY(SELECT quote_ident(n::text) FROM
  unnest(a.path) n), ', ')
FROM {schema}.tube_attachment a JOIN {schema}.tube_registry t USING (tube)
WHERE a.tube = {tube} AND a.tbl = to_regclass({table}) AND {schema}.tube_where(t.predicate, a.predicate) <> ''"""
_IN_PODS = """
SELECT DISTINCT u.id FROM {schema}.{tube} p CROSS JOIN LATERAL unnest(p.ids) u(id)
WHERE u.id = ANY ({listed})"""

log = get_logger("replicad.spark")


@dataclass(slots=True)
class TableReport:
    """What was found of one table in one downstream. `rows`: of the source, that were compared.

    `missing`, `extra` and `different` have ids; of the last also the columns. `in_flight`: ids that differ, and whose
    pods were not acked in time, or which a backfill that is under way (`backfilling`) may still bring. `unheld`: rows
    of the source that the pipeline cannot carry (docs/types.md). Not `compared`: the downstream cannot be read back.
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
    touched: int = 0
    compared: bool = True

    @property
    def differing(self) -> int:
        """Ids that differ and are not in flight."""
        return len(self.missing) + len(self.extra) + len(self.different)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: counts, and some ids of each kind."""
        return {
            "downstream": self.downstream,
            "table": self.table,
            "compared": self.compared,
            "rows": self.rows,
            **{kind: len(getattr(self, kind)) for kind in (MISSING, EXTRA, DIFFERENT)},
            "in_flight": self.in_flight,
            "backfilling": self.backfilling,
            "unheld": self.unheld,
            "touched": self.touched,
            "examples": {
                MISSING: self.missing[:SHOWN],
                EXTRA: self.extra[:SHOWN],
                DIFFERENT: {str(id_): list(names) for id_, names in list(self.different.items())[:SHOWN]},
            },
        }


def as_local(config: PipelineConfig) -> LocalConfig:
    """The pipeline of Spark as one of the local engine, to read with. Raises UsageError if rows are transformed."""
    if config.transform is not None:
        raise UsageError("the rows of this pipeline go through a transform, so they cannot be compared with the source")
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
    )


def verify(
    config: LocalConfig,
    *,
    sample: float = 1.0,
    wait: float = 60.0,
    repair: bool = False,
    chance: random.Random | None = None,
) -> list[TableReport]:
    """Compare every table of every downstream. `sample`: the share of the pages that are compared, above 0 to 1.

    `wait`: seconds for which what differs may be in flight. `repair`: touch the ids that differ, so that the pipeline
    writes them again.

    Raises:
        UsageError: a downstream cannot be read, or has another form than the source.
        DatabaseError, DownstreamError: one side cannot be used.
    """
    keys = _keys_of(config)
    reports: list[TableReport] = []
    done: list[_Comparison] = []
    for name in config.downstreams:
        for table in _chosen_tables(config):
            work = make_work(config, name, table, keys, prepare=False)
            if type(work.sink).rows is Sink.rows:
                reports.append(TableReport(name, work.name, compared=False))
                continue
            for shard in _shards(config, work.enricher.layout, table):
                title = work.name if table is not None else _table_of(work.enricher.layout, shard)
                report = TableReport(name, title)
                checked = _Comparison(config, work, shard, report, chance or random.Random())  # noqa: S311
                checked.run(sample, wait)
                reports.append(report)
                done.append(checked)
    for checked in done if repair else ():  # not before: what is touched is in flight for the other downstreams
        checked.repair()
    return reports


def works_of(config: LocalConfig) -> Iterator[TableWork]:
    """Every table of every downstream, to be looked at and not changed."""
    keys = _keys_of(config)
    for name in config.downstreams:
        for table in _chosen_tables(config):
            yield make_work(config, name, table, keys, prepare=False)


def _chosen_tables(config: LocalConfig) -> list[TubeTable | None]:
    if config.tables is None:
        return [None]
    chosen = config.tables.chooses
    return [table for table in tables_of(config).values() if table.attached and chosen(table.plain)]


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
        left_out = dict.fromkeys(report.downstream for report in reports if not report.compared)
        if left_out:
            raise UsageError(
                f"downstream {', '.join(left_out)} cannot be compared: an index and a class of yours cannot be read "
                "back; rows of kind postgres, delta and parquet can"
            )
        return
    sums = {kind: sum(len(getattr(report, kind)) for report in found) for kind in (MISSING, EXTRA, DIFFERENT)}
    counts = ", ".join(f"{number:,} {kind}" for kind, number in sums.items() if number)
    where = ", ".join(dict.fromkeys(f"{report.table} in {report.downstream}" for report in found[:5]))
    touched = sum(report.touched for report in found)
    remedy = (
        "they were touched: when the pipeline has written them, verify again"
        if touched
        else "run it again with --repair, which touches them so that the pipeline writes them again"
    )
    raise DownstreamDiffers(f"rows differ ({counts}): {where}; {remedy}")


def _shards(config: LocalConfig, layout: Layout, table: TubeTable | None) -> list[int | None]:
    """The shards that are compared one by one. None: all together, because one table has the rows of all."""
    if table is not None:
        return [table.shard]
    if all("{shard" not in source.rule.table for source in layout.sources):
        if len(layout.sources) > 1:
            raise UsageError("several tables without {shard} in their names cannot be told apart downstream")
        return [None]
    rows = _ask(config.database, _SHARDS.format(schema=quote(config.tube_schema), tube=literal(config.tube)))
    return [shard for shard in rows.column(0).to_pylist() if layout.query(shard) is not None]


def _table_of(layout: Layout, shard: int | None) -> str:
    located = layout.located(shard or 0)
    assert located is not None, "the shards are of the layout"
    return located[1]


class _Comparison:
    """One table, or one shard of it, in one downstream."""

    def __init__(
        self,
        config: LocalConfig,
        work: TableWork,
        shard: int | None,
        report: TableReport,
        chance: random.Random,
    ) -> None:
        self._config = config
        self._work = work
        self._shard = shard
        self._report = report
        self._chance = chance
        self._id = work.shape.id
        layout = work.enricher.layout
        located = layout.located(shard or 0)
        assert located is not None, "the shards are of the layout"
        self._url, self._table, self._form = located[0] or config.database, located[1], located[2]
        self._key = self._form.columns[self._id].expression
        self._is_text = pa.types.is_string(work.shape.ids)
        self._order = f'({self._key}) COLLATE "C"' if self._is_text else self._key
        self._predicates: list[tuple[str, str]] | None = None
        self._suspects: dict[Any, tuple[str, ...]] = {}  # the columns that differ, by id; empty: missing or extra

    def run(self, sample: float, wait: float) -> None:
        """Compare, and look again at what differs."""
        after: Any = None
        with ThreadPoolExecutor(1) as other_side:
            while True:
                if sample < 1 and self._chance.random() >= sample:
                    after, more = self._end_of_page(after)
                else:
                    mine = other_side.submit(self._downstream, after=after, limit=PAGE)
                    source, found = self._source_page(after), mine.result()
                    after, more = self._compare_pages(source, found)
                if not more:
                    break
        self._settle(wait)

    def repair(self) -> None:
        """Touch the ids that differ."""
        report = self._report
        ids = [*report.missing, *report.extra, *report.different]
        if not ids:
            return
        shard = self._shard
        if shard is None:
            rows = _ask(
                self._config.database,
                _SHARDS.format(schema=quote(self._config.tube_schema), tube=literal(self._config.tube)),
            )
            known = rows.column(0).to_pylist()
            if len(known) != 1:
                raise UsageError(
                    f"the rows of {self._table} are in several shards, so which one a missing row is in is not known; "
                    f"touch them yourself: SELECT {self._config.tube_schema}.{{table}}_touch(...) (docs/sql.md)"
                )
            [shard] = known
        call = f"{quote(self._config.tube_schema)}.{quote(self._config.tube + '_touch')}"
        for piece in _pieces(ids):
            _ask(self._config.database, f"SELECT {call}({shard}, {listed(self._array(piece))}, 'T')")
        report.touched = len(ids)

    # --- pages ---

    def _compare_pages(self, source: pa.Table, found: pa.Table) -> tuple[Any, bool]:
        """Compare two pages that begin after the same id. Returns the id up to which they were, and whether more
        follows.
        """
        ends = [page.column(self._id)[-1].as_py() for page in (source, found) if page.num_rows >= PAGE]
        upto = min(ends) if ends else None
        if upto is not None:
            source, found = (
                page.filter(pc.less_equal(page.column(self._id), pa.scalar(upto, self._work.shape.ids)))
                for page in (source, found)
            )
        self._report.rows += source.num_rows
        if UNHELD in source.column_names:
            self._report.unheld += source.num_rows - source.column(UNHELD).null_count
        for id_, names in self._differences(source, found).items():
            if len(self._suspects) >= KEPT:
                raise DownstreamDiffers(
                    f"more than {KEPT:,} rows of {self._table} differ in {self._report.downstream}; back it up by a "
                    "backfill: replicad tubes backfill"
                )
            self._suspects[id_] = names
        return upto, upto is not None

    def _differences(self, source: pa.Table, found: pa.Table) -> dict[Any, tuple[str, ...]]:
        """The ids of one side only, and the ids whose columns differ, with the names of these."""
        ids, theirs = source.column(self._id).combine_chunks(), found.column(self._id).combine_chunks()
        alone = pc.invert(pc.is_in(ids, value_set=theirs))
        extra = pc.invert(pc.is_in(theirs, value_set=ids))
        suspects: dict[Any, tuple[str, ...]] = dict.fromkeys(ids.filter(alone).to_pylist(), ())
        suspects |= dict.fromkeys(theirs.filter(extra).to_pylist(), ())
        source, found = source.filter(pc.invert(alone)), found.filter(pc.invert(extra))
        if UNHELD in source.column_names:
            unheld = pc.is_valid(source.column(UNHELD))
            source, found = source.filter(pc.invert(unheld)), found.filter(pc.invert(unheld))
        names: dict[int, list[str]] = {}
        for name in self._compared:
            for at in _unequal(source.column(name), found.column(name)):
                names.setdefault(at, []).append(name)
        known = source.column(self._id)
        return suspects | {known[at].as_py(): tuple(columns) for at, columns in names.items()}

    @property
    def _compared(self) -> list[str]:
        return [name for name in self._work.shape.schema.names if name not in (self._id, "_shard", "_seq")]

    def _source_page(self, after: Any) -> pa.Table:
        condition = "true" if after is None else f"{self._order} > {self._literal(after)}"
        return self._read(f"{condition} ORDER BY {self._order} LIMIT {PAGE}")

    def _source_of(self, ids: Sequence[Any]) -> pa.Table:
        return self._read(self._form.found.replace("$1", listed(self._array(ids))))

    def _read(self, condition: str) -> pa.Table:
        """Rows of the source, in the order of their ids."""
        rows = _ask(self._url, self._form.select(self._table, condition))
        fields = [self._work.shape.schema.field(name) for name in (self._id, *self._compared)]
        fields += [pa.field(UNHELD, pa.string())] if UNHELD in rows.column_names else []
        return conform(rows, pa.schema(fields)).sort_by(self._id)

    def _downstream(self, *, after: Any = None, limit: int | None = None, ids: Sequence[Any] | None = None) -> pa.Table:
        """Rows of the downstream, in the order of their ids."""
        wanted = None if ids is None else self._array(ids)
        found = self._work.sink.rows(self._work.shape, self._shard, after=after, limit=limit, ids=wanted)
        assert found is not None, "verify asks only downstreams that can be read back"
        schema = pa.schema([self._work.shape.schema.field(name) for name in (self._id, *self._compared)])
        return conform(found, schema).sort_by(self._id)

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

    def _settle(self, wait: float) -> None:
        """Look again at what differs, until it is equal or settled, or the time is over."""
        until = time.monotonic() + wait
        before: dict[Any, Any] = {}  # the row of the source at the last look, of ids without a pod since before it
        while self._suspects:
            kept: dict[Any, Any] = {}
            for piece in _pieces(list(self._suspects)):
                busy = self._in_pods(piece)
                source, found = self._source_of(piece), self._downstream(ids=piece)
                differing = self._differences(source, found)
                rows = {row[self._id]: row for row in source.to_pylist()}
                there = set(found.column(self._id).to_pylist())
                unwanted = self._unwanted([id_ for id_ in differing if id_ in rows and id_ not in there])
                busy |= self._in_pods(piece)
                for id_ in piece:
                    if id_ not in differing or id_ in unwanted:
                        del self._suspects[id_]
                    elif id_ not in busy:
                        self._suspects[id_] = differing[id_]
                        if id_ in before and before[id_] == rows.get(id_):
                            self._note(id_, id_ in rows, id_ in there, differing[id_])
                            del self._suspects[id_]
                        else:
                            kept[id_] = rows.get(id_)
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
        """Those of the ids that pods in the tube have; all of them while a backfill is under way."""
        schema, tube = quote(self._config.tube_schema), literal(self._config.tube)
        busy = _ask(self._config.database, _BUSY.format(schema=schema, tube=tube)).column(0)[0].as_py()
        self._report.backfilling = busy > 0
        if busy:
            return set(ids)
        sql = _IN_PODS.format(
            schema=schema,
            tube=quote(self._config.tube),
            listed=listed(self._array(ids)),
        )
        return set(_ask(self._config.database, sql).column(0).to_pylist())

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


def _pieces(ids: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(ids), AT_ONCE):
        yield ids[begin : begin + AT_ONCE]


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
    if not report.compared:
        return f"{report.downstream}: {report.table}: not compared, because this downstream cannot be read back"
    counts: Mapping[str, int] = {
        "rows": report.rows,
        MISSING: len(report.missing),
        EXTRA: len(report.extra),
        DIFFERENT: len(report.different),
        "in flight (a backfill is under way)" if report.backfilling else "in flight": report.in_flight,
        "not carried": report.unheld,
        "touched": report.touched,
    }
    text = ", ".join(f"{number:,} {name}" for name, number in counts.items() if number or name == "rows")
    equal = "" if report.differing else ", the others equal" if report.in_flight or report.unheld else ", equal"
    return f"{report.downstream}: {report.table}: {text}{equal}"
