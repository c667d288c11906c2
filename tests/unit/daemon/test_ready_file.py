"""The ready file, in a folder in which another account may have prepared something."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicad.config.settings import Address
from replicad.daemon.daemon import _ready_file
from replicad.errors import EnvironmentRefused

ADDRESS = Address("127.0.0.1", 9009)


def test_what_another_account_has_prepared_beside_the_ready_file_is_neither_followed_nor_written_to(
    tmp_path: Path,
) -> None:
    """A link beside it, by the name that was written to first, had the daemon overwrite a file of its own account."""
    precious, ready = tmp_path / "precious", tmp_path / "ready"
    precious.write_text("precious")
    (tmp_path / "ready.new").symlink_to(precious)
    ready.symlink_to(precious)
    with _ready_file(ready, ADDRESS):
        assert (ready.read_text(), ready.is_symlink()) == ("127.0.0.1:9009\n", False)
        assert ready.stat().st_mode & 0o777 == 0o644
    assert precious.read_text() == "precious"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["precious", "ready.new"]


def test_a_ready_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "ready").mkdir()
    with pytest.raises(EnvironmentRefused, match="cannot be written"), _ready_file(tmp_path / "ready", ADDRESS):
        raise AssertionError
    assert [one.name for one in tmp_path.iterdir()] == ["ready"]
