"""Finds the error that ended a query in what Spark says about it."""

from __future__ import annotations

import re
from typing import Any

from replicad import errors
from replicad.errors import ReplicadError, SparkWorkerLost

_LOST = re.compile(r"Python worker (?:failed to connect back|exited unexpectedly)[^\n]*")
_OURS = re.compile(r"replicad\.errors\.([A-Za-z]+): (.+)")


def explain(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The ReplicadError that ended a query: `cause`, or one in the text of Spark's error. Otherwise `error` itself."""
    if isinstance(error, ReplicadError):
        return error
    if isinstance(cause, ReplicadError):
        return cause
    for text in (str(error), str(cause or "")):
        for name, sentence in reversed(_OURS.findall(text)):
            kind: Any = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, ReplicadError):
                return kind(sentence.strip())
    lost = _LOST.search(str(error))
    return error if lost is None else SparkWorkerLost(f"{lost[0]}; is the machine too busy or out of memory?")
