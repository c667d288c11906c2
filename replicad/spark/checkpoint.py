"""The folder of a checkpoint, for small files of ours beside Spark's files: on this machine, or where Hadoop reads."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from replicad.errors import EnvironmentRefused, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
PARKED = "replicad.parked"  # pods of a batch that may be replayed were parked


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
