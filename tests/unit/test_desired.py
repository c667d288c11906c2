"""The file for `replicad apply`: every mistake is a sentence with its place, and what is written can be read again."""

from __future__ import annotations

import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad import features
from replicad.errors import UsageError
from replicad.terminal.desired import Section, SectionKey, read_tables, render
from tests.keys_page import DESIRED as PAGE
from tests.keys_page import render as render_page

SECTIONS = features.sections()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[stream.a]", "f: stream is not known; did you mean streams?"),
        ("[bogus]", "f: bogus is not known; there are streams, tubes, presence, caches, sharding"),
        ("streams = 1", "f: streams must be a table: write [streams.NAME]"),
        ("presence = true", "f: presence must be a table: write [presence]"),
        ("[streams]\na = 1", "f: streams.a must be a table: write [streams.a]"),
        ("[streams.a]\ntable = 't'", "f: streams.a.id is missing; give a text in quotes"),
        ("[streams.a]\ntabel = 't'\ntable = 't'\nid = 'i'", "f: streams.a.tabel is not known; did you mean table?"),
        ("[streams.'a b']\ntable = 3\nid = 'i'", 'f: streams."a b".table: 3 is not valid; give a text in quotes'),
        (
            "[streams.a]\ntable='t'\nid='i'\nmethod='x'",
            "f: streams.a.method: 'x' is not valid; give lock_watch, reservation or positions_table",
        ),
        (
            "[streams.a]\ntable='t'\nid='i'\nmax_row=true",
            "f: streams.a.max_row: true is not valid; give bytes such as 1048576",
        ),
        (
            "[streams.a]\ntable='t'\nid='i'\nmax_row='1GiB'",
            "f: streams.a.max_row: 1073741824 is out of range; give a number from 1024 to 6",
        ),
        ("[tubes.t]\npartitions = 0", "f: tubes.t.partitions: 0 is out of range; give a number from 1 to 32768"),
        ("[tubes.t]\ntables = ['a']", 'f: tubes.t.tables: ["a"] is not valid; give a table for each name'),
        ("[tubes.t.tables.a]\nshard = 1.5", "f: tubes.t.tables.a.shard: 1.5 is not valid; give a whole number"),
        ("[tubes.t.tables.a]\nshards = 'x'", "f: tubes.t.tables.a.shards: 'x' is not valid; give shards such as"),
        ("[tubes.t.tables.a]\nroute = 'x'", "f: tubes.t.tables.a.route is not known; did you mean routing?"),
        ("[presence]\ngrace = '1y'", "f: presence.grace: '1y' is not valid; give seconds such as 30"),
        ("[presence]\ngrace = 1979-05-27", 'f: presence.grace: "1979-05-27" is not valid; give seconds'),
        ("[caches]\nwriters = 'a'", 'f: caches.writers: \'a\' is not valid; give a list of texts, such as ["a", "b"]'),
        ("[sharding.s]\nslots = 5000", "f: sharding.s.slots: 5000 is out of range; give a number from 1 to 4096"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_place_and_what_to_write(content: str, said: str) -> None:
    _, faults = read_tables(tomllib.loads(content), SECTIONS, "f")
    (fault,) = faults
    assert fault.startswith(said), fault


def test_the_table_of_the_page_is_the_declaration() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert render_page(page) == page, "run python -m tests.keys_page"


def test_the_example_of_the_page_has_no_mistake() -> None:
    (example,) = re.findall(r"```toml\n(\[streams.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    wanted, faults = read_tables(tomllib.loads(example), SECTIONS, "f")
    assert faults == []
    assert set(wanted) == {section.name for section in SECTIONS}


def test_all_mistakes_of_a_file_are_found_at_once() -> None:
    _, faults = read_tables(tomllib.loads("[streams.a]\nx = 1\n[tubes.t]\ny = 2\n[z]"), SECTIONS, "f")
    assert len(faults) == 5  # x, no table, no id, y, z


def test_what_has_lost_its_table_is_a_remark_in_the_file() -> None:
    broken = {"streams": {"a": {key.name: None for key in SECTIONS[0].keys} | {"id": "id"}}}
    text = render(broken, SECTIONS)
    assert text == "# [streams.a] is left out: its table does not exist any more, so it cannot be made again\n"
    assert read_tables(tomllib.loads(text), SECTIONS, "f") == ({}, [])


def objects_of(section: Section) -> st.SearchStrategy[dict[str, dict[str, object]]]:
    names = st.text(min_size=1, max_size=8) if section.named else st.just("")
    return st.dictionaries(names, values_of(section.keys), max_size=3)


def values_of(keys: tuple[SectionKey, ...]) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries({key.name: value_of(key) for key in keys if not key.once})


KINDS: list[tuple[object, st.SearchStrategy[object]]] = [
    ("x", st.text(min_size=1)),
    ("reservation", st.just("reservation")),
    (4000, st.integers(1024, 4096)),
    (5.5, st.floats(1, 3600)),
]


def accepts(key: SectionKey, probe: object) -> bool:
    try:
        return bool(key.take(probe, "f") == probe)
    except UsageError:
        return False


def value_of(key: SectionKey) -> st.SearchStrategy[object]:
    """Any value that the key accepts, in normal form."""
    if key.inner:
        return st.dictionaries(st.text(min_size=1, max_size=8), values_of(key.inner), max_size=3)
    if key.default == ():
        return st.lists(st.text(min_size=1), unique=True).map(lambda found: tuple(sorted(found)))
    given_one = st.one_of([values for probe, values in KINDS if accepts(key, probe)])
    return given_one if key.required else st.one_of(st.just(key.default), given_one)


@given(st.fixed_dictionaries({section.name: objects_of(section) for section in SECTIONS}))
def test_what_is_written_is_read_as_the_same(objects: dict[str, dict[str, dict[str, object]]]) -> None:
    wanted, faults = read_tables(tomllib.loads(render(objects, SECTIONS)), SECTIONS, "f")
    assert faults == []
    for section in SECTIONS:
        assert stripped(wanted.get(section.name, {}), section.keys) == objects[section.name]


def stripped(found: dict[str, dict[str, object]], keys: tuple[SectionKey, ...]) -> dict[str, dict[str, object]]:
    """Without the keys that describe nothing."""
    return {
        name: {
            key.name: stripped(values[key.name], key.inner) if key.inner else values[key.name]  # type: ignore[arg-type]
            for key in keys
            if not key.once
        }
        for name, values in found.items()
    }
