"""How a query reaches the daemon: the endpoint from the options, and what is done about lost connections."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from replicad.client.blocking_client import Endpoint
from replicad.errors import ReplicadError, UsageError
from replicad.spark.options import SourceOptions

LONGEST_PAUSE = 5.0  # seconds between two tries


def endpoint_of(options: SourceOptions, *, timeout: float | None = None) -> Endpoint:
    """Where to connect to. Reads the token's file, so it is for whoever is about to connect.

    `timeout` in seconds, for the connection and for an answer, goes before those of the options.

    Raises:
        UsageError: the file of the token cannot be read.
    """
    return Endpoint(
        options.host,
        options.port,
        token=_token(options),
        server_name=options.server_name,
        connect_timeout=options.connect_timeout if timeout is None else timeout,
        tls_ca=options.tls_ca,
        **({} if timeout is None else {"answer_timeout": timeout}),
    )


def _token(options: SourceOptions) -> str | None:
    if options.token_file is None:
        return options.token
    try:
        lines = Path(options.token_file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"option tokenFile: {options.token_file} cannot be read: {error}") from error
    if len(lines) != 1:
        raise UsageError(f"option tokenFile: {options.token_file} must hold one word, the token")
    return lines[0]


@dataclass(slots=True)
class Retries:
    """Counts the tries of one piece of work, with a pause between two that doubles."""

    left: int
    pause: float
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def of(cls, options: SourceOptions) -> Self:
        """As many and as long as the options say."""
        return cls(options.num_retries, options.retry_interval)

    def pause_or_raise(self, error: ReplicadError) -> None:
        """Wait before the next try; raise `error` where there is none left."""
        if self.left <= 0:
            raise error
        self.left -= 1
        self.sleep(self.pause)
        self.pause = min(self.pause * 2, LONGEST_PAUSE)


def patience_of(options: SourceOptions) -> float:
    """Seconds that all the pauses between tries add up to, for what retries by itself."""
    total, pause = 0.0, options.retry_interval
    for _ in range(options.num_retries):
        total += pause
        pause = min(pause * 2, LONGEST_PAUSE)
    return total
