"""A downstream as a user would write one: a folder of text files, one for each row."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa


@dataclass
class Files:
    folder: str

    def path(self, shard: int, one: int) -> Path:
        return Path(self.folder) / f"{shard}.{one}"

    def write(self, rows: pa.Table) -> None:
        for row in rows.to_pylist():
            self.path(row["_shard"], row["id"]).write_text(f"{row['_seq']}|{row['name']}|{row['people']}")

    def delete(self, shard: int, ids: Sequence[int]) -> None:
        for one in ids:
            self.path(shard, one).unlink(missing_ok=True)

    def stale_ids(self, shard: int, before: int) -> Iterator[int]:
        for path in Path(self.folder).glob(f"{shard}.*"):
            if int(path.read_text().partition("|")[0]) < before:
                yield int(path.suffix[1:])

    def rows(self) -> dict[tuple[int, int], tuple[str, int]]:
        found = {}
        for path in Path(self.folder).iterdir():
            shard, _, one = path.name.partition(".")
            _, name, people = path.read_text().split("|")
            found[int(shard), int(one)] = (name, int(people))
        return found


@dataclass
class Slow(Files):
    """Says that it has begun, and waits until it may go on."""

    patience: int = 120  # seconds

    def write(self, rows: pa.Table) -> None:
        (Path(self.folder) / "begun").touch()
        deadline = time.monotonic() + self.patience
        while not (Path(self.folder) / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        super().write(rows)


class Broken(Files):
    """Fails with every batch, and says that it has begun."""

    def write(self, rows: pa.Table) -> None:
        (Path(self.folder) / "begun").touch()
        raise ValueError(f"does not like {rows.num_rows} rows")


class Fenced(Files):
    """Keeps the terms and batches that it is given."""

    def begin(self, term: int, batch: int) -> None:
        with Path(f"{self.folder}.begun").open("a") as out:
            out.write(f"{term} {batch}\n")
