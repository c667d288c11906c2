"""How a query connects to the daemon: the endpoint and the retries, from the options of the source."""

from __future__ import annotations

from replicad.client.blocking_client import Endpoint
from replicad.config.secrets import read_token
from replicad.retry import Backoff, Retries
from replicad.spark.options import SourceOptions

LONGEST_PAUSE = 5.0  # seconds between two tries


def endpoint_of(options: SourceOptions, *, timeout: float | None = None) -> Endpoint:
    """Where to connect to. Reads the file of the token.

    `timeout` in seconds, for the connection and for an answer, overrides those of the options.

    Raises:
        UsageError: the file of the token cannot be read.
    """
    return Endpoint(
        options.host,
        options.port,
        token=options.token if options.token_file is None else read_token(options.token_file, "option tokenFile"),
        server_name=options.server_name,
        connect_timeout=options.connect_timeout if timeout is None else timeout,
        tls_ca=options.tls_ca,
        **({} if timeout is None else {"answer_timeout": timeout}),
    )


def retries_of(options: SourceOptions) -> Retries:
    """The number of retries and the pauses of the options."""
    return Retries(options.retry_interval, LONGEST_PAUSE, most=options.num_retries)


def patience_of(options: SourceOptions) -> float:
    """The sum in seconds of all pauses, for clients that retry by themselves."""
    backoff = Backoff(options.retry_interval, LONGEST_PAUSE)
    return sum(backoff.whole(tries) for tries in range(options.num_retries))
