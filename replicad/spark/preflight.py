"""The checks of a pipeline before Spark starts: its daemon, its database, its attached tables, its downstream.

A reader inside Spark would otherwise find a wrong port, a wrong database or TLS on one side only, after half a minute
of retries, in its log. A warning names tables that the pipeline would read and whose changes do not reach its tube.

The checkpoint records which pods were acked, so their rows are downstream and nowhere else. If the downstream was
dropped, created again, restored or replaced, the rows are missing there: only rows that are touched later would come.
So the checkpoint keeps the identity of the downstream (`Sink.identity`), and each start compares it. The identity
survives a restore, so the last batches of the downstream (`Sink.last_batch`) are compared with Spark's logs too: a
downstream that is behind was put back, and so was a checkpoint that is behind.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from replicad.errors import (
    ConnectionLost,
    DatabaseError,
    DatabaseUnavailable,
    ReplicadError,
    TubeRefused,
    UsageError,
)
from replicad.eventlog import get_logger
from replicad.retry import Backoff
from replicad.spark.checkpoint import DOWNSTREAM, PARKED, Checkpoint
from replicad.spark.database import forget, literal, patiently, quote
from replicad.spark.options import SourceOptions, endpoint_of
from replicad.spark.pipeline_config import AVAILABLE_NOW, PipelineConfig
from replicad.spark.tables import list_tables
from replicad.sqlstates import MISSING, NO_RIGHT, means
from replicad.tubes.shards import ALL_SHARDS

ANSWER = 3.0  # seconds for a connection to a daemon and for its answer
LONGEST_PAUSE = 5.0  # seconds between two tries
PATIENCE = 60.0  # seconds for which a run that ends by itself waits for what cannot be reached
STALLED = 600.0  # seconds for which it waits for a backfill that does not go on: a table may be locked for long
_SAY_EVERY = 60.0  # seconds between two sentences about that
_PROBE_PAUSE = 1.0  # seconds between two looks at the parts while a pipeline ends
_LOOK = 0.2  # seconds between two questions whether the run must end

log = get_logger("replicad.spark")


def wait_until_ready(
    config: PipelineConfig,
    must_end: Callable[[], bool],
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until the daemons have the tube and the databases answer. False if the run must end first.

    Says in one sentence what cannot be reached, after the first try.

    Raises:
        UsageError: TLS on one side only, or a certificate that is not trusted.
        UnknownTube, NotAuthorised, DatabaseRefused: trying again does not help.
        ConnectionLost, DatabaseUnavailable: a run that ends by itself has waited for `PATIENCE` seconds.
    """
    backoff, begun, said = Backoff(0.5, LONGEST_PAUSE, jitter=0.0), now(), ""
    while True:
        try:
            check_daemons(config)
            check_databases(config)
        except (ConnectionLost, DatabaseUnavailable) as error:
            if config.trigger == AVAILABLE_NOW and now() - begun >= PATIENCE:
                raise
            if str(error) != said:
                said = str(error)
                log.warning("waiting", error=said, hint="trying again; is the address right, and does it run?")
        else:
            if said:
                log.info("reached", seconds=round(now() - begun, 1))
            return True
        until = now() + backoff.next_delay()
        while now() < until:
            if must_end():
                return False
            sleep(_LOOK)


def check_daemons(config: PipelineConfig) -> None:
    """Ask every daemon for the tube. Raises as `wait_until_ready`."""
    for options in config.source.by_island().values():
        assert options.tube is not None
        try:
            with endpoint_of(options, timeout=ANSWER).connect("replicad-check") as client:
                client.tube_made(options.tube)
        except ConnectionLost as error:
            _check_tls(options, error)
            raise


def check_databases(config: PipelineConfig) -> None:
    """Connect to every database that has rows. Raises DatabaseRefused or DatabaseUnavailable."""
    for url in dict.fromkeys([config.database, *(rule.database for rule in config.rules if rule.database)]):
        try:
            patiently(url, _ask, patience=0)
        finally:
            forget(url)


def _ask(driver: Any) -> None:
    with driver.cursor() as cursor:
        cursor.execute("SELECT 1")
        cursor.fetchall()


def _check_tls(options: SourceOptions, error: ConnectionLost) -> None:
    """Raise UsageError if only one side wants TLS, or the certificate is not trusted."""
    where = f"the daemon at {options.host}:{options.port}"
    if options.tls_ca is None:
        if speaks_tls(options.host, options.port):
            raise UsageError(
                f"{where} speaks TLS; give the option tlsCa, the file of the authority that signed its certificate, or "
                "`system`"
            ) from error
        return
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        raise UsageError(f"{where} has a certificate that is not trusted: {cause.verify_message}; see tlsCa") from error
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        raise UsageError(f"{where} does not speak TLS; leave the option tlsCa out, or give its TLS port") from error


def speaks_tls(host: str, port: int) -> bool:
    """Whether a server answers a TLS handshake. Nothing is sent beyond it."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is only asked whether it is TLS
    try:
        with socket.create_connection((host, port), timeout=ANSWER) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it wants a certificate of ours, or another version
    except OSError:
        return False


class Watch:
    """Looks, while a pipeline ends, whether the batch in hand can end: `trouble` is what cannot be reached.

    Runs in a thread of its own, because a look may take as long as the time-out of a connection.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self.trouble: str | None = None
        self._config = config
        self._done = threading.Event()
        threading.Thread(target=self._look, name="replicad-watch", daemon=True).start()

    def close(self) -> None:
        """End the looks."""
        self._done.set()

    def _look(self) -> None:
        while not self._done.is_set():
            try:
                check_daemons(self._config)
                check_databases(self._config)
                self._config.sink.probe()
            except ReplicadError as error:
                self.trouble = str(error)
                return
            self._done.wait(_PROBE_PAUSE)


LOOK_EVERY = 600.0  # seconds between two looks for the tables of new shards
_MOST = 10  # shards in a warning

_ATTACHED = """
SELECT shard, pg_catalog.array_to_string(pg_catalog.array_agg(DISTINCT root::text), ', '), count(DISTINCT root),
  pg_catalog.bool_or(routing IS NOT NULL)
FROM {schema}.tube_attachment WHERE tube = {tube} GROUP BY shard ORDER BY shard"""


@dataclass(slots=True)
class Attachments:
    """Looks at the tables that are attached to the tube, at the start of a run and from time to time."""

    config: PipelineConfig
    now: Callable[[], float] = time.monotonic
    _due: float = 0.0
    _warned: set[int] = field(default_factory=set)

    def look(self) -> None:
        """Warn of changes since the last look. Does nothing if that was a short while ago."""
        if self.now() < self._due:
            return
        self._due = self.now() + LOOK_EVERY
        for attached, there in self._looked():
            self._warn_of_shared(attached)
            self._warn_of_missing(attached, there)

    def _looked(self) -> Iterator[tuple[list[tuple[Any, ...]], set[int]]]:
        """For each database: the attached shards, and the shards with a table."""
        sql = _ATTACHED.format(schema=quote(self.config.tube_schema), tube=literal(self.config.tube))

        def work(driver: Any) -> tuple[list[tuple[Any, ...]], list[tuple[str, str, bool]]]:
            with driver.cursor() as cursor:
                cursor.execute(sql)
                return list(cursor.fetchall()), list_tables(driver)

        rules = self.config.rules
        for url in dict.fromkeys([self.config.database, *(rule.database for rule in rules if rule.database)]):
            try:
                attached, listed = patiently(url, work, patience=0)
            except DatabaseError as error:  # for example, this user may not read it
                log.debug("attachments_unknown", error=str(error))
                continue
            finally:
                forget(url)
            mine = [rule for rule in rules if (rule.database or self.config.database) == url]
            names = {full for full, _, _ in listed} | {short for _, short, visible in listed if visible}
            yield attached, {shard for rule in mine for name in names if (shard := rule.shard_of(name)) is not None}

    def _warn_of_shared(self, attached: list[tuple[Any, ...]]) -> None:
        """The tube does not say of which of several tables an id is."""
        for shard, tables, count, routed in attached:
            if count > 1 and not routed and shard not in self._warned:
                self._warned.add(shard)
                log.warning(
                    "tables_share_shard",
                    shard=shard,
                    tables=tables,
                    hint=f"an id in tube {self.config.tube} may be of each; attach each table with a shard of its own, "
                    "or let all of them have the id of one row",
                )

    def _warn_of_missing(self, attached: list[tuple[Any, ...]], there: set[int]) -> None:
        """The table of a new shard: its rows are read if they are touched, and nothing touches them."""
        if not attached or any(routed for *_, routed in attached):  # it is filled by hand, or the rows say their shards
            return
        new = sorted(there - {shard for shard, *_ in attached} - self._warned)
        self._warned.update(new)
        if new:
            log.warning(
                "shards_not_attached",
                shards=new[:_MOST],
                count=len(new),
                hint=f"changes of these tables do not come: replicad tubes attach {self.config.tube} TABLE --shard "
                "N-M, then a backfill of them",
            )


def check_downstream(config: PipelineConfig, checkpoint: Checkpoint) -> None:
    """Compare the downstream with that of the checkpoint, whose folder exists. `prepare` was called before.

    With `rebuild` a backfill of all rows is scheduled, and the checkpoint goes on with the new one. A checkpoint that
    does not know its downstream yet takes the present one for it.

    Raises:
        UsageError: it is another one, or the role may not schedule the backfill. DatabaseError: it cannot be scheduled.
    """
    found, known = config.sink.identity(), (checkpoint.read(DOWNSTREAM) or "").strip() or None
    why = _not_the_same(config, checkpoint) if known in (None, found) else _REPLACED
    if why is not None:
        if not config.rebuild:
            raise UsageError(
                f"the downstream is not the one that checkpoint {config.checkpoint} has written to: {why}. Start with "
                "--rebuild, which schedules a backfill of all rows; or bring the old one back"
            )
        _schedule_backfill(config)
        checkpoint.write(PARKED, "")  # a batch that is planned comes again, and another copy may have acked its pods
        checkpoint.record_anew()
        checkpoint.remove(
            DOWNSTREAM
        )  # if there is none yet (an index without documents), a later start takes the new one
    if found is not None and (found != known or why is not None):
        checkpoint.write(DOWNSTREAM, f"{found}\n")


_REPLACED = "it was dropped, restored or replaced, and rows that were acked before are missing in it"


def _not_the_same(config: PipelineConfig, checkpoint: Checkpoint) -> str | None:
    """Why the batches of the downstream and of Spark's logs are not of one history; None if they are.

    Spark logs the commit of a batch when the downstream has it as a whole. So the downstream has at least the committed
    batches, and at most the planned ones.
    """
    spark, recorded = checkpoint.batches(), checkpoint.recorded_as()
    if spark.query is None:
        return None
    last = config.sink.last_batch(spark.query + recorded.suffix)
    if last is None:
        return None
    if last.newest > spark.planned:
        return (
            f"it has batch {last.newest}, and the checkpoint has planned batches up to {spark.planned} only, so the "
            "checkpoint was put back from an older copy, and its next batches would be taken for batches that are there"
        )
    if last.restored or last.whole < spark.committed >= recorded.since:
        return (
            f"it has batch {last.whole} as its last one, and batch {spark.committed} was acked, so it was put back "
            "from an older copy, and rows that were acked are missing in it"
        )
    return None


def _schedule_backfill(config: PipelineConfig) -> None:
    shards = 0
    for url in dict.fromkeys([config.database, *(rule.database for rule in config.rules if rule.database)]):
        shards += request_backfill(url, config.tube_schema, config.tube, config.key[0])
        forget(url)
    log.warning("downstream_rebuilt", tube=config.tube, shards=shards, checkpoint=str(config.checkpoint))


def request_backfill(url: str, schema: str, tube: str, key: str | None) -> int:
    """Ask for a backfill of all tables of a tube; returns of how many. `key`: their key; None: the one that each has.

    Raises:
        UsageError: the role of `url` may not. DatabaseError: Postgres cannot be used.
    """
    [(first, last)] = ALL_SHARDS.ranges
    column = "NULL" if key is None else literal(key)
    call = f"{quote(schema)}.tube_backfill_request({literal(tube)}, {column}, {first}, {last})"

    def work(driver: Any) -> int:
        with driver.cursor() as cursor:
            cursor.execute(f"SELECT count(*) FROM {call}")
            return int(cursor.fetchone()[0])

    try:
        return patiently(url, work, patience=10)
    except DatabaseError as error:
        if not means(error.sqlstate, NO_RIGHT):
            raise
        raise UsageError(
            f"--rebuild: the role of the pipeline may not schedule the backfill of tube {tube} ({error}); start it "
            "once as the role of the daemon: replicad pipeline run FILE --rebuild --database URL"
        ) from error


_UNFINISHED = "SELECT tbl::text AS tbl, ids FROM {schema}.tube_backfill WHERE tube = {text} AND NOT finished UNION ALL"
_AWAITED = """
SELECT coalesce(string_agg(DISTINCT x.tbl, ', '), ''), coalesce(sum(x.ids), 0)::bigint,
  EXISTS (SELECT FROM {schema}.{tube} p WHERE p.op = 'B' AND p.seq > {after}
    AND p.payload ->> 'type' IS DISTINCT FROM 'backfill_schedule')
FROM ({unfinished}
  SELECT p.payload ->> 'tbl', 0 FROM {schema}.{tube} p
  WHERE p.op = 'B' AND cardinality(p.ids) = 0 AND p.payload ->> 'type' = 'backfill_schedule'
) x (tbl, ids)"""


class AwaitedBackfills:
    """The backfills that a run which ends by itself still has to read: scheduled, running, or in the tube.

    Without them such a run would end well right after a backfill was scheduled, and had copied nothing.

    `there`: at the last look some of their pods were in the tube, and not read.
    """

    def __init__(self, url: str, schema: str, tube: str, *, now: Callable[[], float] = time.monotonic) -> None:
        """`url`: of the tube's database."""
        self.there = False
        self._url = url
        self._schema = schema
        self._tube = tube
        self._now = now
        self._seen: tuple[str, int, bool] = ("", 0, False)  # tables, the ids that they have put into the tube, `there`
        self._seen_at = self._said_at = now()
        self._unseen = False  # whether the role may not read which are running

    def look(self, after: int = -1, *, busy: bool = False) -> bool:
        """Whether there are some. `after`: up to which seq backfill pods have been read. `busy`: what was read is being
        written, or was written since the last look.

        Raises:
            TubeRefused: they do not go on. DatabaseError: Postgres cannot be used.
        """
        seen = self._asked(after)
        tables, ids, self.there = seen
        now = self._now()
        if busy or seen != self._seen:
            self._seen, self._seen_at = seen, now
        if tables and not self.there and now >= self._said_at + _SAY_EVERY:
            self._said_at = now
            log.info("waiting_for_backfill", tube=self._tube, tables=tables[:200], ids=ids)
        awaited = bool(tables) or self.there
        if awaited and now >= self._seen_at + STALLED:
            raise TubeRefused(
                f"the backfill of {tables[:200] or self._tube} has not gone on for {STALLED:.0f} s, so the copy is not "
                "complete. Does a daemon serve the database, and is the table locked? See: replicad tubes stats "
                f"{self._tube}. Where it can never go on, as of a table that was dropped: replicad tubes backfill "
                f"{self._tube} --cancel"
            )
        return awaited

    def _asked(self, after: int) -> tuple[str, int, bool]:
        names = {"schema": quote(self._schema), "tube": quote(self._tube), "text": literal(self._tube)}
        unfinished = "" if self._unseen else _UNFINISHED.format(**names)

        def work(driver: Any) -> tuple[str, int, bool]:
            with driver.cursor() as cursor:
                cursor.execute(_AWAITED.format(unfinished=unfinished, after=after, **names))
                tables, ids, there = cursor.fetchone()
                return str(tables), int(ids), bool(there)

        try:
            return patiently(self._url, work, patience=10)
        except DatabaseError as error:
            if means(error.sqlstate, MISSING):  # the tube is in another database
                return "", 0, False
            if self._unseen or not means(error.sqlstate, NO_RIGHT):
                raise
            self._unseen = True
            grant = f"GRANT SELECT ON {self._schema}.tube_backfill TO the role of the pipeline"
            log.warning("backfills_not_seen", tube=self._tube, error=str(error), hint=grant)
            return self._asked(after)
