"""What functions in front of caches do: keys, groups, adopted functions, storages, threads, forks."""

from __future__ import annotations

import enum
import functools
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from replicad.caches.cache import RETRY, CacheStatistics, LruStorage
from replicad.caches.following import InvalidationFollower
from replicad.caches.keys import Invalidation, freeze, parse_rows
from replicad.caches.registry import Caches
from replicad.errors import UsageError
from tests.conftest import PATIENCE

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def caches() -> Caches:
    made = Caches(max_staleness=math.inf)
    made.stand(live=True)
    return made


class Calls:
    """A function that counts: its value is which call it was."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def note(self, *args: Any) -> int:
        self.made.append(args)
        return len(self.made)


# --- keys ---


@given(st.lists(JSON, max_size=3), st.lists(JSON, max_size=3))
def test_keys_are_one_entry_exactly_where_they_are_the_same_json(one: list[Any], other: list[Any]) -> None:
    def written(value: Any) -> Any:  # numbers by value, true apart from 1
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return (type(value).__name__, value)
        if isinstance(value, list):
            return ("list", [written(item) for item in value])
        if isinstance(value, dict):
            return ("dict", {name: written(item) for name, item in value.items()})
        return ("number", Fraction(repr(value)))

    assert freeze(one) == freeze(json.loads(json.dumps(one)))
    assert hash(freeze(one)) == hash(freeze(json.loads(json.dumps(one))))
    assert (freeze(one) == freeze(other)) == (written(one) == written(other))


@given(st.text(min_size=1), st.none() | st.lists(JSON, max_size=3))
def test_a_row_says_what_was_written(func: str, keys: list[Any] | None) -> None:
    assert parse_rows([json.dumps([func, keys, 1490197670513])]) == [Invalidation(func, keys)]


@given(st.text())
def test_no_text_gets_through_as_a_row_by_chance(text: str) -> None:
    assert parse_rows([text]) == [None]


PIECES = ['["f",null]', '["f",[1],0]', '["f",[', "1]]", '["f",null],["g"', "null]", "", " ", "7", '"', "\n[1]"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=6))
def test_rows_that_come_together_are_what_each_is_alone(rows: list[str]) -> None:
    assert parse_rows(rows) == [told for row in rows for told in parse_rows([row])]


@pytest.mark.parametrize(
    "make",
    [
        lambda caches: caches.cached(name="f", key=lambda user: user)(lambda user: user)("@bob:example.com"),
        lambda caches: caches.cached(name="f", key=lambda user: {user})(lambda user: user)("@bob:example.com"),
        lambda caches: caches.cached(name="f", key=lambda user: {"user": user})(lambda user: user)("@bob:example.com"),
        lambda caches: caches.cached(name="f", key=lambda user: user)(lambda user: user)(b"@bob:example.com"),
        lambda caches: caches.cached(name="f", key=lambda user: user)(lambda user: user)(7),
        lambda caches: caches.invalidate("f", "abc"),
        lambda caches: caches.register_group("g", "abc"),
        lambda caches: caches.register_group("g", [b"abc"]),
        lambda caches: caches.register_group("g", ["f", ("f",)]),
    ],
)
def test_a_text_in_the_place_of_a_list_of_keys_is_refused(caches: Caches, make: Callable[[Caches], object]) -> None:
    with pytest.raises(TypeError, match=r"\ba? ?list\b|name of a cache, or a pair"):
        make(caches)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda caches: caches.invalidate(freeze, [1]), TypeError, 'its name "freeze" is meant'),
        (lambda caches: caches.invalidate(None), TypeError, "named by a text"),
        (lambda caches: caches.invalidate(["f"], [1]), TypeError, "named by a text"),
        (lambda caches: caches.register_group(5, ["f"]), TypeError, "a group is named by a text"),
        (lambda caches: caches.cache("x" * 201), TypeError, "1 to 200 characters"),
        (lambda caches: caches.cache("f", max_entries="5"), TypeError, "max_entries"),
        (lambda caches: caches.cache("f", storage=dict), TypeError, "storage="),
        (lambda caches: caches.cache("f", storage=[]), TypeError, "storage="),
        (lambda _: Caches(max_staleness="60"), TypeError, "max_staleness"),
        (lambda _: Caches(max_staleness=math.nan), TypeError, "max_staleness"),
        (lambda _: Caches(max_staleness=0), TypeError, "max_staleness"),
        (lambda _: Caches(tolerate=None), TypeError, "tolerate"),
        (lambda _: Caches(tolerate=-1), TypeError, "tolerate"),
        (lambda caches: caches.register_group("g", ["g"]), UsageError, "g is a group"),
    ],
)
def test_wrong_uses_are_refused_where_they_are_written(caches: Caches, make: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        make(caches)


def test_a_group_in_a_group_is_refused_in_either_order_since_its_caches_would_be_stale(caches: Caches) -> None:
    caches.register_group("inner", ["f"])
    with pytest.raises(UsageError, match="inner is a group and cannot be a member of group outer"):
        caches.register_group("outer", ["inner"])
    caches.register_group("other", ["later"])
    with pytest.raises(UsageError, match="later is a group and cannot be a member of group other"):
        caches.register_group("later", ["f"])


@pytest.mark.parametrize("rekeyed", ["ab", b"ab", {"a", "b"}, {"a": "b"}, 7, [object()]])
def test_keys_of_a_group_that_are_no_list_empty_its_member(caches: Caches, rekeyed: Any) -> None:
    cache = caches.cache("f")
    caches.register_group("g", [("f", lambda _keys: rekeyed)])
    cache.store(cache.begin(("a", "b")), "kept")
    caches.apply(['["g", ["x"], 0]'])
    assert (cache.statistics().entries, caches.statistics().malformed) == (0, 1)


def test_a_large_number_names_one_entry_as_a_float_and_in_the_digits_of_jsonb(caches: Caches) -> None:
    cache = caches.cache("f")
    for value in (1e23, 1.5e300, -1e23):
        cache.store(cache.begin(freeze([value])), "old")
        caches.apply([f'["f", [{int(Decimal(repr(value)))}], 0]'])
    assert cache.statistics().entries == 0


@pytest.mark.parametrize(
    "row",
    [
        f'["f", [1{"0" * 400}.5], 0]',
        '["f", [1e999], 0]',
        f'["f", [{"[" * 5000}{"]" * 5000}], 0]',
        f'["f", [{"[" * 101}{"]" * 101}], 0]',
        '["f", [NaN], 0]',
        f'["f", [{"9" * 5000}], 0]',
    ],
    ids=["beyond a double", "an exponent", "nested", "nested a little", "no number", "many digits"],
)
def test_a_key_that_no_value_can_have_empties_everything_and_ends_nothing(caches: Caches, row: str) -> None:
    cache = caches.cache("f")
    cache.store(cache.begin((1,)), "kept")
    caches.apply([row, '["f", [2], 0]'])
    assert (cache.statistics().entries, cache.statistics().invalidated, caches.statistics().malformed) == (0, 1, 1)


@pytest.fixture
def high_recursion_limit() -> Iterator[None]:
    """As other code of the process may set it, hypothesis among it."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("high_recursion_limit")
@pytest.mark.parametrize("depth", [101, 5000])
def test_how_deep_a_key_may_be_does_not_depend_on_the_interpreters_limit(caches: Caches, depth: int) -> None:
    cache = caches.cache("f")
    deepest = json.loads("[" * 100 + "]" * 100)
    cache.store(cache.begin(freeze([deepest])), "kept")
    caches.apply([json.dumps(["f", [deepest], 0])])
    assert (cache.statistics().entries, caches.statistics().malformed) == (0, 0)
    with pytest.raises(TypeError, match="nested too deeply"):
        freeze([json.loads("[" * depth + "]" * depth)])
    caches.apply([f'["f", [{"[" * depth}{"]" * depth}], 0]'])
    assert caches.statistics().malformed == 1


@pytest.mark.parametrize(
    "row", ["[]", '["f"]', '["f", 1]', "[1, null]", '{"f": 1}', "[" * 100_000, "null", '["f", nul']
)
def test_a_row_that_nobody_understands_empties_everything(caches: Caches, row: str) -> None:
    cache = caches.cache("f")
    cache.store(cache.begin((1,)), "kept")
    late = cache.begin((2,))
    caches.apply([row])
    assert not cache.store(late, "old")
    assert caches.statistics().caches["f"].entries == 0
    assert caches.statistics().malformed == 1


# --- decorated functions ---


def test_entries_are_named_by_the_arguments_in_the_order_of_the_signature(caches: Caches) -> None:
    calls = Calls()

    @caches.cached()
    def f(user: str, limit: int = 10, *, deep: bool = False) -> int:
        return calls.note(user, limit, deep)

    assert [f("a"), f("a", 10), f(limit=10, user="a"), f("a", deep=False)] == [1, 1, 1, 1]
    assert [f("a", 1), f("a", True), f("a", deep=True)] == [2, 3, 4]
    caches.apply(['["f", ["a", 10, false], 0]'])
    assert [f("a"), f("a", 1), f("a", deep=True)] == [5, 2, 4]
    caches.apply(['["f", ["a"], 0]', '["g", null, 0]'])
    assert f("a") == 5, "another entry, and another cache"
    caches.apply(['["f", null, 0]'])
    assert [f("a"), f("a", 1)] == [6, 7]


def test_arguments_that_are_no_json_are_refused_and_key_says_what_stands_for_them(caches: Caches) -> None:
    class Colour(enum.StrEnum):
        RED = "red"

    class Store:
        @caches.cached(key=lambda self, user: [user])
        def load(self, user: str) -> object:
            return object()

        @caches.cached(name="bare")
        def bare(self) -> None: ...

    one = Store().load(Colour.RED)
    assert Store().load("red") is one
    caches.apply(['["load", ["red"], 0]'])
    assert Store().load("red") is not one
    with pytest.raises(TypeError, match=r"Store is no JSON value.*give key="):
        Store().bare()
    with pytest.raises(TypeError, match=r"any number of arguments: give key="):
        caches.cached()(lambda *users: users)
    with pytest.raises(UsageError, match="a cache load already"):
        caches.cache("load")


def test_what_raises_is_not_kept_and_leaves_nothing_behind(caches: Caches) -> None:
    calls = Calls()

    @caches.cached()
    def f(n: int) -> int:
        if calls.note(n) == 1:
            raise KeyError(n)
        return n

    with pytest.raises(KeyError):
        f(1)
    assert [f(1), f(1), len(calls.made)] == [1, 1, 2]


async def test_async_functions_are_cached_and_a_cancelled_load_leaves_nothing_behind(caches: Caches) -> None:
    calls = Calls()

    @caches.cached()
    async def f(n: int) -> int:
        count = calls.note(n)
        if count == 1:
            await trio.sleep_forever()
        return count

    with trio.move_on_after(0):
        await f(1)
    assert [await f(1), await f(1)] == [2, 2]
    caches.invalidate("f", [1])
    assert await f(1) == 3


async def test_a_value_that_can_be_used_once_only_is_refused_and_not_kept(caches: Caches) -> None:
    async def load(user: str) -> str:
        return user

    def letters(user: str) -> Iterator[str]:
        yield from user

    async def lazily(user: str) -> object:
        return letters(user)

    class Hidden:
        """What it returns cannot be seen before it is called."""

        def __init__(self, function: Callable[[str], object]) -> None:
            self.function = function

        def __call__(self, user: str) -> object:
            return self.function(user)

    for name, function in {"coroutine": Hidden(load), "generator": Hidden(letters)}.items():
        cached = caches.cached(name=name)(function)
        for _ in range(2):
            with pytest.raises(TypeError, match=f"a {name}, which can be used once"):
                cached("a")
        assert caches.statistics().caches[name].entries == 0
    with pytest.raises(TypeError, match="a generator, which can be used once"):
        await caches.cached()(lazily)("a")
    with pytest.raises(TypeError, match="letters makes generators"):
        caches.cached()(letters)
    assert await caches.cached(name="part")(functools.partial(load, "b"))() == "b"


def test_a_cache_is_bounded_and_counts(caches: Caches) -> None:
    calls = Calls()

    @caches.cached(max_entries=2)
    def f(n: int) -> int:
        return calls.note(n)

    assert [f(1), f(2), f(1), f(3), f(1), f(2)] == [1, 2, 1, 3, 1, 4]
    caches.stand(live=False, problem="gone")
    assert f(1) == 5
    assert caches.statistics().problem == "gone"
    assert caches.statistics().caches["f"] == CacheStatistics(2, 2, 4, 1, 1, 0, 0)
    with pytest.raises(UsageError, match="caches nothing"):
        LruStorage(0)


def test_a_storage_of_another_make_is_used_as_it_is_and_may_refuse_values(caches: Caches) -> None:
    class Picky(dict[Any, Any]):
        """As the caches of cachetools do where getsizeof says that a value is too large."""

        def __setitem__(self, key: Any, value: Any) -> None:
            if value > 10:
                raise ValueError("value too large")
            super().__setitem__(key, value)

    storage = Picky()
    f = caches.cached(name="f", storage=storage)(lambda n: n)
    assert [f(1), f(11), f(11)] == [1, 11, 11]
    assert storage == {(1,): 1}
    caches.apply(['["f", [1], 0]'])
    assert storage == {}


class Failing(dict[Any, Any]):
    """A storage, or the cache of a function, of which every method may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: set[str] = set()

    def _fail(self, method: str) -> None:
        if method in self.fails:
            raise ConnectionError(f"{method}: the storage is away")

    def get(self, key: Any, default: Any = None, /) -> Any:
        self._fail("get")
        return super().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._fail("set")
        super().__setitem__(key, value)

    def pop(self, key: Any, default: Any = None, /) -> Any:
        self._fail("pop")
        return super().pop(key, default)

    def clear(self) -> None:
        self._fail("clear")
        super().clear()

    def __len__(self) -> int:
        self._fail("len")
        return super().__len__()


def test_a_storage_that_raises_ends_nothing_and_is_not_used_until_it_was_emptied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = [0.0]
    caches = Caches(max_staleness=math.inf, now=lambda: clock[0])
    following = InvalidationFollower(caches, "caches")
    storage, truth = Failing(), ["old"]
    of_function: dict[str, str] = {}

    @functools.wraps(lambda name: truth[0])
    def kept(name: str) -> str:
        return of_function.setdefault(name, truth[0])

    kept.cache_clear = lambda: (storage._fail("clear"), of_function.clear())  # type: ignore[attr-defined]
    load = caches.cached(name="load", storage=storage)(lambda name: truth[0])
    adopted = caches.adopt(kept, name="adopted")

    def both() -> list[str]:
        return [load("a"), adopted("a")]

    with following.session():  # that of the thread: what it raises would end it
        caches.stand(live=True)
        truth[0] = "new" if both() == ["old"] * 2 else "lost"
        storage.fails = {"clear", "pop", "len"}
        caches.apply(['["load", ["a"], 0]', '["adopted", ["a"], 0]'])
        assert both() == ["new", "new"], "what could not be removed is not used"
        problems = {name: one.problem for name, one in caches.statistics().caches.items()}
        assert all("ConnectionError('clear: the storage is away')" in (said or "") for said in problems.values())
        caches.apply(['["nobody understands"'])
    assert caches.problem == "following the stream has ended"
    with following.session():
        caches.stand(live=True)
        assert both() == ["new", "new"]
        storage.fails = set()
        assert both() == ["new", "new"]
        assert (storage, of_function) == ({("a",): "old"}, {"a": "old"}), "it is tried with every call"
        clock[0] += RETRY
        assert both() == ["new", "new"]
        assert (storage, of_function) == ({("a",): "new"}, {"a": "new"})
        assert [one.problem for one in caches.statistics().caches.values()] == [None, None]
        storage.fails = {"get", "set"}
        assert load("a") == "new"
        assert load("b") == "new"
        storage.fails = {"pop"}
        truth[0] = "newer"
        caches.apply(['["load", ["b"], 0]'])
        assert storage == {}, "one that cannot forget an entry is emptied"
    events = [record.event for record in caplog.records]  # type: ignore[attr-defined]
    assert [events.count(event) for event in ("cache_not_emptied", "cache_usable")] == [2, 2]


# --- groups ---


def test_a_group_invalidates_its_members_each_by_its_own_keys(caches: Caches) -> None:
    def broken(keys: Any) -> Any:
        raise KeyError(keys)

    held = {name: caches.cache(name) for name in ("same", "first", "all", "odd", "other")}
    caches.register_group("cs_cache_fake", ["same", ("first", lambda keys: keys[:1])])
    caches.register_group("cs_cache_fake", [("all", lambda keys: None), ("odd", broken), "not here"])

    def fill() -> None:
        for cache in held.values():
            for key in [("!room",), ("!room", "@user"), ("!other",)]:
                cache.store(cache.begin(key), 1)

    fill()
    caches.apply(['["cs_cache_fake", ["!room", "@user"], 0]'])
    entries = {name: caches.statistics().caches[name].entries for name in held}
    assert entries == {"same": 2, "first": 2, "all": 0, "odd": 0, "other": 3}
    assert caches.statistics().malformed == 1
    fill()
    caches.apply(['["cs_cache_fake", null, 0]'])
    entries = {name: caches.statistics().caches[name].entries for name in held}
    assert entries == {"same": 0, "first": 0, "all": 0, "odd": 0, "other": 3}


# --- functions with a cache of their own ---


def test_an_adopted_function_never_keeps_what_it_read_before_an_invalidation(caches: Caches) -> None:
    """The value is stored by lru_cache itself, after the clear, and must be seen by nobody."""
    truth = ["old"]
    read, go_on = threading.Event(), threading.Event()

    @functools.lru_cache
    def load(name: str) -> str:
        value = truth[0]
        if value == "old":
            read.set()
            assert go_on.wait(PATIENCE)
        return value

    get = caches.adopt(load)
    late: list[str] = []
    thread = threading.Thread(target=lambda: late.append(get("a")))
    thread.start()
    assert read.wait(PATIENCE)
    truth[0] = "new"
    caches.apply(['["load", ["a"], 0]'])
    assert get("a") == "new", "bypassed, while what was read before may still be stored"
    assert load.cache_info().currsize == 0
    go_on.set()
    thread.join(PATIENCE)
    assert late == ["old"]
    assert [get("a"), get("a")] == ["new", "new"]
    assert load.cache_info().hits == 1
    caches.stand(live=False, problem="gone")
    truth[0] = "newer"
    assert get("a") == "newer"
    with pytest.raises(UsageError, match=r"cache_clear\(\) and __wrapped__"):
        caches.adopt(len)


# --- threads and processes ---


def test_any_number_of_threads_may_call_and_invalidate(caches: Caches) -> None:
    """What is served is never older than what was invalidated before the call."""
    truth, told, wrong = [0] * 4, [0] * 4, []
    f = caches.cached(name="f", max_entries=3)(lambda n: truth[n])
    stop = threading.Event()

    def read(n: int) -> None:
        while not stop.is_set():
            floor = told[n]
            if f(n) < floor:
                wrong.append(n)

    readers = [threading.Thread(target=read, args=(n % 4,)) for n in range(6)]
    for thread in readers:
        thread.start()
    for turn in range(4000):
        n = turn % 4
        truth[n] += 1
        caches.apply([f'["f", [{n}], 0]'])
        told[n] = truth[n]
    stop.set()
    for thread in readers:
        thread.join(PATIENCE)
    assert not wrong
    assert [f(n) for n in range(4)] == truth
    assert caches.statistics().caches["f"].hits > 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("locked", [False, True], ids=["idle", "while another thread holds the lock"])
def test_a_forked_child_does_not_trust_what_nobody_follows_there(caches: Caches, locked: bool) -> None:
    calls = Calls()

    @caches.cached()
    def f(n: int) -> int:
        return calls.note(n)

    g = caches.adopt(functools.lru_cache(f), name="g")
    assert [f(1), f(1), g(1)] == [1, 1, 1]
    let_go, holds = threading.Event(), threading.Event()

    def hold() -> None:
        with caches.lock:
            holds.set()
            let_go.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    if locked:
        thread.start()
        holds.wait(PATIENCE)
    child = os.fork()
    if child == 0:
        good = (f(1), g(1), caches.live, caches.statistics().caches["f"].entries) == (2, 3, False, 0)
        os._exit(0 if good and "forked" in str(caches.problem) else 1)
    let_go.set()
    assert os.waitpid(child, 0)[1] == 0
    assert [f(1), caches.live] == [1, True]


def test_caches_follow_one_stream_at_a_time(caches: Caches) -> None:
    for _ in range(2):
        with caches.follower(), pytest.raises(UsageError, match="follow a stream already"), caches.follower():
            pass
