"""Remedies of SQL functions as commands that a shell takes, whatever a name holds."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.terminal.failures import as_commands

NAMES = st.text(st.characters(min_codepoint=33, exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1)


@given(NAMES, st.sampled_from(["stream_remove", "writer_enable"]))
def test_a_name_is_one_word_of_the_command(name: str, function: str) -> None:
    call = f"SELECT replicad.{function}('{name.replace(chr(39), chr(39) * 2)}')"
    if function == "stream_remove":
        words = ["replicad", "streams", "remove", name]
        text = as_commands(f"run: {call}").removeprefix("run: ")
    else:
        words = ["replicad", "sharding", "enable", name]
        text = as_commands(f"run `replicad sharding enable {name}`, or: {call}").removeprefix("run `").removesuffix("`")
    assert shlex.split(text) == words


@pytest.mark.parametrize("text", ["it is so", "SELECT replicad.stream_trim('s', 5)"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert as_commands(text) == text
