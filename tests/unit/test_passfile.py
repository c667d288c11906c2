"""Passwords of ~/.pgpass, with the escapes and wildcards of libpq."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicad.postgres.passfile import find_password

FILE = r"""# a comment
db1:5432:app:me:pa\:ss\\word
db2:*:*:*:second
[::1]:5432:app:me:wrong form
\:\:1:6000:app:me:six
localhost:5432:app:me:of the socket
*:5432:app:o\:dd:last
"""


@pytest.fixture
def passfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "pgpass"
    file.write_text(FILE)
    file.chmod(0o600)
    for name in ("PGPASSWORD", "PGSERVICE", "PGHOST", "PGPORT", "PGUSER", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PGPASSFILE", str(file))
    return file


@pytest.mark.parametrize(
    ("url", "password"),
    [
        ("postgresql://me@db1/app", r"pa:ss\word"),
        ("postgresql://me@db1:5433/app", None),
        ("postgresql://me@db3,db2:7/app?target_session_attrs=primary", "second"),
        ("postgresql://you@db1/app", None),
        ("postgresql://me@[::1]:6000/app", "six"),
        ("postgresql://me@/app?host=/run/pg", "of the socket"),
        ("postgresql://me@/app?host=/a,/b&port=1,5432", "of the socket"),
        ("postgresql://o%3Add@anywhere/app", "last"),
        ("postgresql://me:own@db1/app", None),
        ("postgresql:///app?service=prod", None),
    ],
)
def test_the_first_entry_that_fits_has_the_password(passfile: Path, url: str, password: str | None) -> None:
    assert find_password(url) == password


def test_the_url_may_name_the_file_and_a_file_for_all_eyes_is_not_read(
    passfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGPASSFILE")
    url = f"postgresql://me@db1/app?passfile={passfile}"
    assert find_password(url) == r"pa:ss\word"
    passfile.chmod(0o644)
    assert find_password(url) is None
    passfile.unlink()
    assert find_password(url) is None
