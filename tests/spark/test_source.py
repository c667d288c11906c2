"""The source, call by call as Spark makes them, against a daemon in memory: acks, replay, leases, limits, faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_daemon import FakeDaemon, Pod
from harness import QUERIES, Query, make_source, struct
from helpers import options

from replicad.errors import (
    ConnectionLost,
    CursorAhead,
    DataLoss,
    EncodingUnavailable,
    LeaseForked,
    LeaseHeld,
    LeaseLost,
    NotAuthorised,
    UnknownTube,
    UsageError,
)
from replicad.spark.holding import WHOLE, TubeHold
from replicad.spark.tubes import TubeStreamReader, read_range
from replicad.tubes.commands import Part
from tests.conftest import PATIENCE

from ..integration.clients.proxy import FaultProxy

QUICK = {"pollTimeout": "0", "retryInterval": "10ms"}


@pytest.fixture(autouse=True)
def _no_query_outlives_its_test() -> Iterator[None]:
    yield
    while QUERIES:
        QUERIES.pop().die()


def wait_until(condition: Callable[[], bool], within: float = PATIENCE) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_pods_are_read_once_in_order_and_acked_only_when_their_batch_is_committed(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    for number in range(10):
        daemon.touch("t", 3, [number])
    query = Query(options(daemon, **QUICK, maxPodsPerTrigger="4"))
    assert query.trigger()
    assert len(tube.pods) == 10  # read, and not acked before the next trigger says that the batch is committed
    assert query.trigger()
    assert len(tube.pods) == 6
    query.drain()
    assert [len(batch) for batch in query.rows] == [4, 4, 2]
    assert query.ids == list(range(10))
    assert tube.pods == {}


def test_the_last_batch_is_acked_by_an_idle_trigger(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    daemon.touch("t", 3, [1])
    query = Query(options(daemon, **QUICK))
    assert query.trigger()
    assert not query.trigger()
    assert tube.pods == {}


def test_regular_pods_come_before_backfill_and_backfill_has_its_own_limit(daemon: FakeDaemon) -> None:
    daemon.make_tube("t", 2)
    for number in range(6):
        daemon.touch("t", number, [number], op="B")
    for number in range(10, 13):
        daemon.touch("t", number, [number])
    query = Query(options(daemon, **QUICK, maxPodsPerTrigger="100", maxBackfillPodsPerTrigger="2"))
    query.drain()
    assert [sorted({row["op"] for row in batch}) for batch in query.rows] == [["B", "U"], ["B"], ["B"]]
    for batch in query.rows:
        assert sum(row["op"] == "B" for row in batch) == 2
    assert sorted(query.ids) == [0, 1, 2, 3, 4, 5, 10, 11, 12]


def test_backfill_can_be_left_out(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    daemon.touch("t", 1, [1], op="B")
    daemon.touch("t", 1, [2])
    query = Query(options(daemon, **QUICK, maxBackfillPodsPerTrigger="0"))
    query.drain()
    assert query.ids == [2]
    assert [pod.op for pod in tube.pods.values()] == ["B"]


def test_a_killed_driver_replays_its_batch_exactly_although_more_pods_came(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t", 2)
    for number in range(8):
        daemon.touch("t", number, [number])
    query = Query(options(daemon, **QUICK, maxPodsPerTrigger="4", leaseTtl="100ms", leaseWait="5s"))
    query.trigger()

    def die() -> None:
        raise KeyboardInterrupt

    query.before_commit = die
    with pytest.raises(KeyboardInterrupt):
        query.trigger()
    planned = query.rows.pop()  # what the sink of the dead driver got, half of it perhaps
    daemon.touch("t", 0, [100])
    daemon.touch("t", 1, [101], op="B")
    again = query.kill()
    assert again.rows[-1] == planned
    again.drain()
    assert sorted(again.ids) == [*range(8), 100, 101]
    assert tube.pods == {}


def test_an_ack_that_was_done_before_the_crash_is_no_data_loss(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    for number in range(6):
        daemon.touch("t", 1, [number])
    query = Query(options(daemon, **QUICK, maxPodsPerTrigger="3", leaseTtl="100ms", leaseWait="5s"))
    query.trigger()
    query.reader.latestOffset(
        query.offsets[-1], query.limit
    )  # acks batch 0, plans batch 1, and dies before the log has it
    assert len(tube.acked) == 3
    again = query.kill()
    again.drain()
    assert again.ids == list(range(6))


def test_pods_that_somebody_else_removed_are_data_loss_or_a_warning(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    for number in range(4):
        daemon.touch("t", 1, [number])
    query = Query(options(daemon, **QUICK, leaseTtl="100ms"))
    end = query.reader.latestOffset(query.offsets[0], query.limit)
    del tube.pods[2]
    (partition,) = query.reader.partitions(query.offsets[0], end)
    with pytest.raises(DataLoss, match=r"4 pods were planned .* 3 are there.*failOnDataLoss"):
        list(read_range(partition))
    query.die()
    lenient = Query(options(daemon, **QUICK, failOnDataLoss="false", leaseWait="5s"), [query.offsets[0], end])
    assert lenient.ids == [0, 2, 3]


def test_a_changed_number_of_partitions_loses_and_repeats_nothing(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t", 2)
    for number in range(40):
        daemon.touch("t", number, [number])
    query = Query(options(daemon, **QUICK, maxPodsPerTrigger="10"))
    query.trigger()
    daemon.make_tube("t", 3)
    tube.old_numbers = [2, 2]  # the daemon looks once a second
    query.trigger()
    assert query.offsets[-1]["n"] == 3
    daemon.make_tube("t", 1)
    query.drain()
    assert sorted(query.ids) == list(range(40))
    assert tube.pods == {}


def test_a_batch_of_an_older_number_of_partitions_replays_under_its_own(daemon: FakeDaemon) -> None:
    daemon.make_tube("t", 2)
    for number in range(6):
        daemon.touch("t", number, [number])
    query = Query(options(daemon, **QUICK, leaseTtl="100ms", leaseWait="5s"))
    end = query.reader.latestOffset(query.offsets[0], query.limit)
    query.offsets.append(end)
    daemon.make_tube("t", 5)
    again = query.kill()
    assert sorted(again.ids) == list(range(6))
    again.drain()
    assert sorted(again.ids) == list(range(6))
    assert daemon.tubes["t"].pods == {}


def test_available_now_ends_at_what_was_there_when_it_began(daemon: FakeDaemon) -> None:
    daemon.make_tube("t", 2)
    for number in range(10):
        daemon.touch("t", number, [number], op="B" if number < 5 else "U")
    query = Query(options(daemon, maxPodsPerTrigger="3", maxBackfillPodsPerTrigger="1"), available_now=True)
    batches = 0
    while query.trigger():
        batches += 1
        daemon.touch("t", batches, [1000 + batches], op="B")
        assert batches < 20
    assert set(query.ids) >= set(range(10))
    assert len(query.ids) < 10 + batches


def test_a_trigger_waits_for_the_first_pod_of_any_partition_and_no_longer(daemon: FakeDaemon) -> None:
    daemon.make_tube("t", 4)
    query = Query(options(daemon, pollTimeout="300s"))
    timer = threading.Timer(0.2, daemon.touch, ("t", 3, [7]))
    timer.start()
    started = time.monotonic()
    assert query.trigger()
    assert 0.15 < time.monotonic() - started < PATIENCE
    assert query.ids == [7]


def test_an_idle_trigger_costs_a_few_requests_not_thousands(daemon: FakeDaemon) -> None:
    daemon.make_tube("t", 2)
    query = Query(options(daemon, pollTimeout="100ms"))
    assert not query.trigger()
    before = len(daemon.requests)
    for _ in range(3):
        assert not query.trigger()
    assert len(daemon.requests) - before <= 9


def test_a_batch_of_few_pods_is_planned_with_few_requests(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the whole tube, and one for each partition until all of its pods were found."""
    daemon.make_tube("t", 4)
    monkeypatch.setattr(TubeStreamReader, "reportLatestOffset", lambda _: None)  # it has requests of its own
    plans: list[tuple[Part, int]] = []
    plan = TubeHold.plan

    def counted(hold: TubeHold, part: Part, *given: Any, **bounds: Any) -> Any:
        found = plan(hold, part, *given, **bounds)
        plans.append((part, found.pods))
        return found

    monkeypatch.setattr(TubeHold, "plan", counted)
    query = Query(options(daemon, **QUICK, maxIdsPerTask="1000"))
    for number in range(12):
        daemon.touch("t", number % 3, [number])
        plans.clear()
        assert query.trigger()
        (first, *between, last) = plans
        assert (first, last[1]) == ((WHOLE, 1), 1)
        assert len(between) <= 3
        assert not any(pods for _, pods in between)
    plans.clear()
    assert not query.trigger()
    assert plans == [(WHOLE, 0)]
    for shard, op in ((0, "B"), (1, "U"), (2, "B")):
        daemon.touch("t", shard, [50 + shard], op=op)
    query.drain()
    assert sorted(query.ids) == [*range(12), 50, 51, 52]
    assert daemon.tubes["t"].pods == {}


def test_enough_pods_are_waited_for_but_not_for_ever(daemon: FakeDaemon) -> None:
    daemon.make_tube("t", 2)
    more = {"minPodsPerTrigger": "5", "maxTriggerDelay": "400ms", "pollTimeout": "50ms"}
    query = Query(options(daemon, **more))
    daemon.touch("t", 0, [1])
    assert not query.trigger()
    for number in range(2, 6):
        daemon.touch("t", number, [number])
    assert query.trigger()
    assert len(query.ids) == 5
    daemon.touch("t", 1, [6])
    assert not query.trigger()
    wait_until(query.trigger, within=PATIENCE)
    assert query.ids[-1] == 6


def test_ids_bound_a_batch_too(daemon: FakeDaemon) -> None:
    daemon.make_tube("t")
    for number in range(6):
        daemon.touch("t", 1, range(number * 10, number * 10 + 10))
    query = Query(options(daemon, **QUICK, maxIdsPerTrigger="25"))
    query.drain()
    assert [len(batch) for batch in query.rows] == [2, 2, 2]


def test_the_second_query_is_told_who_has_the_tube(daemon: FakeDaemon) -> None:
    daemon.make_tube("t")
    daemon.touch("t", 1, [1])
    first = Query(options(daemon, **QUICK, consumer="nightly"))
    first.trigger()
    with pytest.raises(LeaseHeld, match=r"held by nightly/query@.*leaseWait"):
        Query(options(daemon, **QUICK)).trigger()


def test_the_second_query_takes_over_when_the_first_ends_and_never_sooner(daemon: FakeDaemon) -> None:
    daemon.make_tube("t")
    daemon.touch("t", 1, [1])
    first = Query(options(daemon, **QUICK))
    first.drain()
    second = Query(options(daemon, **QUICK, leaseWait="300s"))
    took = threading.Event()

    def take() -> None:
        second.trigger()
        took.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert not took.wait(0.3)
    daemon.touch("t", 1, [2])
    first.reader.stop()  # idle: it lets the tube go at once
    assert took.wait(PATIENCE)
    assert second.ids == [2]


def test_a_query_that_ends_within_a_batch_keeps_the_tube_until_its_tasks_must_be_dead(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    daemon.touch("t", 1, [1])
    query = Query(options(daemon, **QUICK))
    query.trigger()
    query.reader.stop()
    assert len(tube.leases) == 1


def test_the_lease_is_renewed_while_a_batch_takes_long(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    daemon.touch("t", 1, [1])
    query = Query(options(daemon, **QUICK, leaseTtl="300ms"))
    query.trigger()
    before = daemon.count("RENEW")
    wait_until(lambda: daemon.count("RENEW") >= before + 6)
    assert not tube.leases[0].expired


def test_a_zombies_tasks_and_acks_are_refused_and_it_claims_anew(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    for number in range(4):
        daemon.touch("t", 1, [number])
    query = Query(options(daemon, **QUICK, maxPodsPerTrigger="2"))
    query.trigger()
    end = query.reader.latestOffset(query.offsets[-1], query.limit)
    (partition,) = query.reader.partitions(query.offsets[-1], end)
    with daemon.moved:
        tube.leases[0].holder, tube.leases[0].term = "somebody else", 4711
    with pytest.raises(LeaseLost):
        list(read_range(partition))
    acked = len(tube.acked)
    with pytest.raises(LeaseHeld, match="somebody else"):
        query.reader.commit(end)
    assert len(tube.acked) == acked
    with daemon.moved:
        tube.leases.clear()
    query.drain()
    assert query.ids == list(range(4))


def test_a_query_that_the_network_cuts_off_gives_way_and_can_neither_read_nor_ack_any_more(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    for number in range(4):
        daemon.touch("t", 1, [number])
    with FaultProxy(daemon.port) as proxy:
        more = {"leaseTtl": "500ms", "numRetries": "0", "maxPodsPerTrigger": "2"}
        cut_off = Query(options(daemon, **{**QUICK, **more, "port": str(proxy.port)}))
        cut_off.trigger()
        end = cut_off.reader.latestOffset(cut_off.offsets[-1], cut_off.limit)
        (partition,) = cut_off.reader.partitions(cut_off.offsets[-1], end)
        proxy.frozen = True  # the connections stand, and nothing goes through them
        other = Query(options(daemon, **QUICK, leaseWait="10s", leaseTtl="10s"))
        other.trigger()
        assert other.ids == [2, 3]
        proxy.frozen = False
        acked = len(tube.acked)
        with pytest.raises(LeaseLost):
            list(read_range(partition))
        with pytest.raises((LeaseHeld, ConnectionLost)):
            cut_off.reader.commit(end)
        assert len(tube.acked) == acked
        other.drain()
        assert tube.pods == {}


def test_a_restarted_daemon_is_waited_for_and_the_term_stays(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    daemon.touch("t", 1, [1])
    query = Query(options(daemon, **QUICK, leaseTtl="20s"))
    query.trigger()
    term = tube.leases[0].term
    daemon.stop()
    threading.Timer(0.3, daemon.start).start()
    daemon.touch("t", 1, [2])
    query.drain()
    assert query.ids == [1, 2]
    assert tube.leases[0].term == term


def test_a_daemon_that_stays_away_ends_the_query_with_a_sentence(daemon: FakeDaemon) -> None:
    daemon.make_tube("t")
    query = Query(options(daemon, **QUICK, numRetries="2"))
    daemon.stop()
    with pytest.raises(ConnectionLost, match=f"127.0.0.1:{daemon.port}"):
        query.trigger()


@pytest.mark.parametrize("encoding", ["lines", "arrow"])
def test_a_task_whose_connection_breaks_goes_on_behind_the_last_pod(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr("replicad.spark.arrow.TARGET_BYTES", 200)  # so that batches are handed over before the break
    daemon.make_tube("t")
    for number in range(300):
        daemon.touch("t", 1, [number], op="B" if number % 3 == 0 else "U")
    query = Query(options(daemon, **QUICK, encoding=encoding))
    daemon.cut_after_pods = 250
    query.trigger()
    assert sorted(query.ids) == list(range(300))


def test_a_batch_is_the_same_in_lines_and_in_blocks_and_may_change_between_them(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t", 2)
    for number in range(250):
        daemon.touch("t", number, [number] * (number % 3), payload={"é": number} if number % 5 == 0 else None)
    wanted = {**QUICK, "includePayload": "true", "leaseTtl": "100ms", "leaseWait": "5s"}
    first = Query(options(daemon, **wanted, encoding="lines"))
    first.trigger()
    first.die()
    again = Query(options(daemon, **wanted, encoding="arrow"), first.offsets, first.commits - 1)
    assert again.rows[-1] == first.rows[-1]
    assert sum("encoding=arrow" in request for request in daemon.requests) == 2
    again.drain()
    assert tube.pods == {}


@pytest.mark.parametrize("pods", [0, 100])
def test_what_the_daemon_has_no_blocks_of_is_read_in_lines_unless_blocks_were_asked_for(
    daemon: FakeDaemon, pods: int
) -> None:
    daemon.make_tube("t")
    for number in range(150):
        daemon.touch("t", 1, [number])
    daemon.arrow = pods
    strict = Query(options(daemon, **QUICK, encoding="arrow", leaseTtl="100ms"))
    with pytest.raises(EncodingUnavailable):
        strict.trigger()
    strict.die()
    query = Query(options(daemon, **QUICK, leaseWait="5s"))
    query.drain()
    assert query.ids == list(range(150))


def test_a_checkpoint_ahead_of_a_restored_tube_is_refused_or_begun_anew(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.spark.holding.POSITION_PATIENCE", 0.1)
    tube = daemon.make_tube("t")
    for number in range(5):
        daemon.touch("t", 1, [number])
    query = Query(options(daemon, **QUICK))
    query.drain()
    tube.top = 2  # a backup was restored
    tube.pods = {pod.seq: pod for pod in tube.acked if pod.seq <= 2}
    with pytest.raises(CursorAhead, match="failOnDataLoss=false"):
        query.trigger()
    assert len(tube.pods) == 2  # nothing was acked that is no longer what it was
    query.reader.stop()
    lenient = Query(options(daemon, **QUICK, failOnDataLoss="false", leaseWait="5s"), query.offsets, query.commits)
    assert lenient.trigger()
    assert lenient.ids == [0, 1]
    lenient.drain()
    assert tube.pods == {}


def restored(*seqs: int) -> list[Pod]:
    """Pods of the present history, with ids that the lost one did not have."""
    return [Pod(seq, "U", 1, (seq + 100,)) for seq in seqs]


@pytest.mark.parametrize("running", [True, False], ids=["while the query runs", "while it does not"])
def test_after_a_fork_of_history_no_pod_is_acked_unread_and_the_query_says_what_is_unknown(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, running: bool
) -> None:
    tube = daemon.make_tube("t")
    for number in range(5):
        daemon.touch("t", 1, [number])
    query = Query(options(daemon, **QUICK, leaseWait="5s"))
    query.drain()
    if not running:
        query.die()
    tube.fork(*restored(2, 3, 4, 5), shared=2)  # the checkpoint is at 5, and its last batch is not acked yet
    if not running:
        query = Query(query.options, query.offsets, query.commits)
    query.drain()
    assert query.ids[-4:] == [102, 103, 104, 105]
    assert tube.pods == {}
    assert tube.unknown == [("g1", 5)]
    assert "the touches of tube t with a seq in (2, 5] are unknown" in caplog.text
    assert "run: replicad tubes backfill t --shard all" in caplog.text
    assert query.offsets[-1]["g"] == "g2"


def test_a_fork_without_pods_is_asked_about_once(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    daemon.touch("t", 1, [1])
    query = Query(options(daemon, **QUICK))
    query.drain()
    tube.fork(shared=None)
    query.drain()
    query.drain()
    assert (tube.unknown, query.ids) == ([("g1", 1)], [1])


def test_a_batch_in_which_history_forks_is_not_acked_and_its_pods_come_again(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    for number in range(5):
        daemon.touch("t", 1, [number])
    query = Query(options(daemon, **QUICK))

    def fork() -> None:
        if tube.generation == "g1":
            tube.fork(*restored(1, 2, 3, 4, 5), shared=0)

    query.before_commit = fork
    query.drain()
    assert query.ids == [0, 1, 2, 3, 4, 101, 102, 103, 104, 105]
    assert tube.pods == {}


def test_tasks_end_early_when_history_forks_and_the_next_batch_has_all_pods(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    for number in range(5):
        daemon.touch("t", 1, [number])
    query = Query(options(daemon, **QUICK))
    planned = query.reader.partitions

    def fork_after_planning(start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
        found: list[Any] = planned(start, end)
        if tube.generation == "g1":
            tube.fork(*restored(1, 2, 3, 4, 5), shared=0)
        return found

    query.reader.partitions = fork_after_planning
    query.drain()
    assert query.ids == [101, 102, 103, 104, 105]
    assert tube.pods == {}


def test_a_batch_that_was_planned_before_a_fork_is_not_repeated_with_other_pods(daemon: FakeDaemon) -> None:
    """The driver was killed within it: Spark repeats the batch from its log."""
    tube = daemon.make_tube("t")
    for number in range(5):
        daemon.touch("t", 1, [number])
    query = Query(options(daemon, **QUICK, leaseWait="5s"))
    query.drain()
    query.die()
    tube.fork(*restored(1, 2, 3, 4, 5, 6), shared=0)
    again = Query(query.options, query.offsets, query.commits - 1)
    assert again.ids == []
    again.drain()
    assert again.ids == [101, 102, 103, 104, 105, 106]
    assert tube.pods == {}


def test_a_batch_read_fails_when_history_forks_within_it(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    daemon.touch("t", 1, [1])
    source = make_source(options(daemon))
    reader = source.reader(struct(source))
    [partition] = reader.partitions()
    tube.fork(shared=0)
    with pytest.raises(LeaseForked):
        list(reader.read(partition))


def test_a_checkpoint_of_another_tube_is_refused_and_acks_nothing(daemon: FakeDaemon) -> None:
    other = daemon.make_tube("u")
    daemon.make_tube("t")
    daemon.touch("u", 1, [1])
    daemon.touch("t", 1, [2])
    query = Query(options(daemon, **QUICK))
    query.drain()
    query.die()
    for commits in (query.commits, query.commits - 1):  # the second one was killed within a batch
        with pytest.raises(UsageError, match=r"is of tube 't', and the option tube is 'u'.*another checkpointLocation"):
            Query({**options(daemon, **QUICK), "tube": "u"}, query.offsets, commits).trigger()
    assert len(other.pods) == 1


@pytest.mark.parametrize("running", [True, False], ids=["while the query runs", "while it does not"])
def test_a_tube_that_was_dropped_and_made_again_is_not_acked_unread(daemon: FakeDaemon, running: bool) -> None:
    before = daemon.make_tube("t")
    daemon.touch("t", 1, [1])
    query = Query(options(daemon, **QUICK))
    query.trigger()
    if not running:
        query.die()
    del daemon.tubes["t"]  # with its leases
    tube = daemon.make_tube("t")
    tube.pods = {pod.seq: replace(pod, ids=(2,)) for pod in before.pods.values()}  # as if the schema were a new one
    tube.top = before.top
    strict = query if running else Query(options(daemon, **QUICK, leaseWait="5s"), query.offsets, query.commits)
    with pytest.raises(CursorAhead, match=r"tube t was dropped and made again.*failOnDataLoss=false"):
        strict.trigger()
    strict.reader.stop()
    assert len(tube.pods) == 1
    lenient = Query(options(daemon, **QUICK, failOnDataLoss="false", leaseWait="5s"), query.offsets, query.commits)
    assert lenient.trigger()
    assert lenient.ids == [2]
    lenient.drain()
    assert tube.pods == {}


def test_a_checkpoint_from_before_offsets_named_the_tube_goes_on(daemon: FakeDaemon) -> None:
    daemon.make_tube("t")
    daemon.touch("t", 1, [1])
    query = Query(options(daemon, **QUICK))
    query.drain()
    query.die()
    daemon.touch("t", 1, [2])
    old = [{key: offset[key] for key in ("n", "p", "v")} for offset in query.offsets]
    again = Query(options(daemon, **QUICK, leaseWait="5s"), old, query.commits)
    again.drain()
    assert again.ids == [2]
    assert again.offsets[-1]["t"] == "t"


def test_a_wrong_token_and_an_unknown_tube_are_said_at_once() -> None:
    with FakeDaemon(token="right") as daemon:
        daemon.make_tube("t")
        with pytest.raises(NotAuthorised):
            Query(options(daemon, token="wrong"))
        with pytest.raises(UnknownTube, match="the tubes are: t"):
            Query({**options(daemon, token="right"), "tube": "nope"})


def test_payloads_come_as_json_text_when_asked_for(daemon: FakeDaemon) -> None:
    daemon.make_tube("t")
    daemon.touch("t", 1, [], op="B", payload={"type": "backfill_end", "start_seq": "5"})
    daemon.touch("t", 1, [5])
    query = Query(options(daemon, **QUICK, includePayload="true"))
    query.drain()
    found = {row["seq"]: row["payload"] for row in query.rows[0]}
    assert found[2] is None
    assert '"backfill_end"' in found[1]


def test_progress_tells_how_far_the_tube_goes(daemon: FakeDaemon) -> None:
    daemon.make_tube("t", 2)
    for number in range(50):
        daemon.touch("t", number, [number])
    query = Query(options(daemon, **QUICK, maxPodsPerTrigger="10"))
    end = query.reader.latestOffset(query.offsets[0], query.limit)
    latest = query.reader.reportLatestOffset()
    assert sum(place["c"] for place in latest["p"].values()) == 50
    assert sum(place["c"] for place in end["p"].values()) == 10


def test_a_batch_read_leaves_pods_where_they_are_and_may_be_repeated(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t", 2)
    for number in range(9):
        daemon.touch("t", number, [number], op="B" if number == 4 else "U")
    found = options(daemon)
    for _ in range(2):
        source = make_source(found)
        reader = source.reader(struct(source))
        rows = [row for one in reader.partitions() for batch in reader.read(one) for row in batch.to_pylist()]
        assert sorted(one for row in rows for one in row["ids"]) == list(range(9))
    assert len(tube.pods) == 9


def test_an_empty_tube_reads_as_nothing_and_is_let_go(daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t")
    source = make_source(options(daemon))
    assert source.reader(struct(source)).partitions() == []
    assert tube.leases == []


def test_making_readers_connects_to_nothing(daemon: FakeDaemon) -> None:
    daemon.make_tube("t")
    source = make_source(options(daemon))
    source.reader(struct(source))
    source.streamReader(struct(source))
    assert daemon.requests == []
