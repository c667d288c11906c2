"""Finds the error that ended a query in what Spark says about it."""

from __future__ import annotations

import re
from typing import Any

from replicad import errors
from replicad.errors import EnvironmentRefused, ReplicadError, SparkFailed, SparkWorkerLost

_LOST = re.compile(
    r"Python worker (?:failed to connect back|exited unexpectedly)[^\n]*|Executor heartbeat timed out[^\n]*"
    r"|ExecutorLostFailure[^\n]*|Timed out while waiting for the Python worker[^\n]*"
)
_OURS = re.compile(r"replicad\.errors\.([A-Za-z]+): (.+)")
_STREAM = re.compile(r"terminated with exception: ([^\n]+)")
_PYTHON = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)): ?([^\n]*)$", re.MULTILINE)
_MOST = 500  # characters of a sentence of Spark's


def explain(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The ReplicadError that ended a query: `cause`, or one in the text of Spark's error.

    What Spark says otherwise becomes a SparkFailed with its sentence, without its stacks. `error` itself if it is
    neither ours nor Spark's.
    """
    for one in (error, cause):
        if isinstance(one, ReplicadError):
            return one
    text = f"{error}\n{cause or ''}"
    ours = _printed(text)
    if ours is not None:
        return ours
    if type(error).__name__ == "Py4JNetworkError":
        return EnvironmentRefused(
            "the JVM of Spark has ended; its log says why (--spark-log), for example out of memory"
        )
    if not _is_of_spark(error):
        return error
    if cause is not None and not _is_of_spark(cause):
        return SparkFailed(f"{type(cause).__name__}: {cause}"[:_MOST])
    return SparkFailed(_sentence(text))


def _is_of_spark(error: BaseException) -> bool:
    return type(error).__module__.startswith(("pyspark.", "py4j."))


def _printed(text: str) -> ReplicadError | None:
    """An error of ours that a task has raised, or that a worker was lost."""
    for name, sentence in reversed(_OURS.findall(text)):
        kind: Any = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, ReplicadError):
            return kind(sentence.strip())
    lost = _LOST.search(text)
    return None if lost is None else SparkWorkerLost(f"{lost[0]}; is the machine too busy or out of memory?")


def _sentence(text: str) -> str:
    """The last exception of Python in the text, else what Spark says, without stacks."""
    python = [f"{name}: {what}".rstrip(": ") for name, what in _PYTHON.findall(text) if "pyspark." not in name]
    if python:
        return python[-1][:_MOST]
    stream = _STREAM.search(text)
    said = stream[1] if stream is not None else text.strip().partition("\n")[0]
    return f"Spark says: {said}"[:_MOST]
