"""The folder of a checkpoint, for small files of ours beside Spark's files: on this machine, or where Hadoop reads."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from replicad.errors import EnvironmentRefused, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(text: str) -> Path | None:
    """The path, also of a `file:` URI; None: a URI of another file system."""
    found = _URI.match(text)
    if found is None:
        return Path(text).expanduser()
    if found[1].lower() != "file":
        return None
    return Path(unquote(urlsplit(text).path))


def place_of(text: str) -> Path | str:
    """The path, or the URI as it was written: `Path` makes one slash of two."""
    local = local_path(text)
    return re.sub(r"^([A-Za-z0-9+.-]+):/(?!/)", r"\1://", text) if local is None else local


def below(folder: Path, text: str) -> str:
    """A path relative to `folder`, as text; a URI stays as it is."""
    return text if _URI.match(text) else str(folder / Path(text).expanduser())


DOWNSTREAM = "replicad-downstream"  # what the downstream says of itself; Spark's own files have other names
BATCHES = "replicad-batches"  # the name under which the downstream has our batches, see `RecordedAs`
PARKED = "replicad.parked"  # pods of a batch that may be replayed were parked


@dataclass(frozen=True, slots=True)
class SparkBatches:
    """The query's id, the last batch in its commit log, and the last batch that it has planned; -1 for none."""

    query: str | None
    committed: int
    planned: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The offset at which a batch ends. Two plans do not share a `mark`: Spark logs the time of the plan too."""

    mark: int
    end: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedAs:
    """The downstream has the batches from number `since` on under the query's id with this suffix.

    A checkpoint or a downstream that was put back gets another suffix when the downstream is rebuilt: the numbers of
    Spark's batches then say nothing about the batches that the downstream had before.
    """

    suffix: str = ""
    since: int = 0


class Checkpoint(ABC):
    """A checkpoint. `location` is what Spark gets.

    All methods raise EnvironmentRefused if the folder cannot be used.
    """

    location: str

    @abstractmethod
    def make(self) -> None:
        """Make the folder if it is missing."""

    @abstractmethod
    def read(self, name: str) -> str | None:
        """The text of a file of ours; None if there is none."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The names in a folder of Spark's; none if there is no such folder."""

    def batches(self) -> SparkBatches:
        """The batches in Spark's logs."""
        metadata = self.read("metadata")
        last = {
            log: max((int(name) for name in self.names(log) if name.isdecimal()), default=-1)
            for log in ("commits", "offsets")
        }
        query = None if metadata is None else str(json.loads(metadata)["id"])
        return SparkBatches(query, last["commits"], last["offsets"])

    def plan(self, number: int) -> BatchPlan:
        """What Spark has logged before a batch."""
        text = self.read(f"offsets/{number}")
        if text is None:
            raise EnvironmentRefused(f"checkpoint {self.location} has no offsets/{number}; was it changed meanwhile?")
        mark = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
        return BatchPlan(mark, json.loads(text.splitlines()[-1]))

    def recorded_as(self) -> RecordedAs:
        """See `RecordedAs`."""
        text = self.read(BATCHES)
        if not text:
            return RecordedAs()
        found = json.loads(text)
        return RecordedAs(found["suffix"], found["since"])

    def record_anew(self) -> None:
        """Let the downstream have the batches from the next one on under a new name: it has none of that name."""
        suffix, since = f"/{secrets.token_hex(4)}", self.batches().committed + 1
        self.write(BATCHES, json.dumps({"suffix": suffix, "since": since}))

    @abstractmethod
    def write(self, name: str, text: str) -> None:
        """Write a file of ours. A crash leaves the old or the new text, or an empty file."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file of ours, if it is there."""


def open_checkpoint(place: Path | str, spark: SparkSession | None = None) -> Checkpoint:
    """The checkpoint at a path or URI. `spark` is needed for a URI.

    Raises:
        UsageError: Spark has no file system for the URI.
    """
    local = local_path(str(place))
    if local is not None:
        return LocalCheckpoint(local)
    assert spark is not None
    return HadoopCheckpoint(str(place), spark)


class LocalCheckpoint(Checkpoint):
    """A folder of this machine, or of a shared file system that is mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self.location = str(self._folder)

    def make(self) -> None:
        """See Checkpoint."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentRefused(f"checkpoint {self._folder} cannot be made: {error.strerror}") from error

    def read(self, name: str) -> str | None:
        """See Checkpoint."""
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EnvironmentRefused(f"{self._folder / name} cannot be read: {error.strerror}") from error

    def names(self, folder: str) -> list[str]:
        """See Checkpoint."""
        try:
            return os.listdir(self._folder / folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise EnvironmentRefused(f"{self._folder / folder} cannot be read: {error.strerror}") from error

    def write(self, name: str, text: str) -> None:
        """See Checkpoint."""
        new = self._folder / f".{name}.new"
        try:
            new.write_text(text, encoding="utf-8")
            os.replace(new, self._folder / name)
        except OSError as error:
            raise EnvironmentRefused(f"{self._folder / name} cannot be written: {error.strerror}") from error

    def remove(self, name: str) -> None:
        """See Checkpoint."""
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentRefused(f"{self._folder / name} cannot be removed: {error.strerror}") from error


class HadoopCheckpoint(Checkpoint):
    """A URI such as `hdfs://name/folder` or `s3a://bucket/folder`, through the file systems that Spark has."""

    def __init__(self, uri: str, spark: SparkSession) -> None:
        self.location = uri
        self._jvm: Any = spark._jvm
        with self._errors():
            self._files = self._path("").getFileSystem(spark._jsc.hadoopConfiguration())

    def make(self) -> None:
        """See Checkpoint."""
        with self._errors():
            self._files.mkdirs(self._path(""))

    def read(self, name: str) -> str | None:
        """See Checkpoint."""
        with self._errors():
            if not self._files.exists(self._path(name)):
                return None
            stream = self._files.open(self._path(name))
            try:
                return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
            finally:
                stream.close()

    def names(self, folder: str) -> list[str]:
        """See Checkpoint."""
        with self._errors():
            if not self._files.exists(self._path(folder)):
                return []
            return [str(one.getPath().getName()) for one in self._files.listStatus(self._path(folder))]

    def write(self, name: str, text: str) -> None:
        """See Checkpoint. An object store makes the object when the stream is closed."""
        with self._errors():
            stream = self._files.create(self._path(name), True)
            stream.write(bytearray(text.encode()))
            stream.close()

    def remove(self, name: str) -> None:
        """See Checkpoint."""
        with self._errors():
            self._files.delete(self._path(name), False)

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self.location.rstrip('/')}/{name}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from py4j.protocol import Py4JJavaError  # noqa: PLC0415 - comes with PySpark

        try:
            yield
        except Py4JJavaError as error:
            text = str(error.java_exception.toString())
            scheme = self.location.partition(":")[0]
            if "UnsupportedFileSystem" in text or "ClassNotFound" in text:
                raise UsageError(
                    f"checkpoint {self.location}: Spark has no file system for {scheme}://; give a path or "
                    "hdfs://, or the jars for it in `spark.jars.packages` (for S3: s3a:// and "
                    "org.apache.hadoop:hadoop-aws of the version of Spark's Hadoop)"
                ) from error
            raise EnvironmentRefused(f"checkpoint {self.location} cannot be used: {text}") from error
