"""What a pipeline can find out before Spark starts, and whether its parts can be reached.

A wrong port, a wrong database or TLS on one side only would otherwise be found by a reader inside Spark, after half a
minute of retries, in its log.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from replicad.errors import ConnectionLost, DatabaseUnavailable, ReplicadError, UsageError
from replicad.eventlog import get_logger
from replicad.retry import Backoff
from replicad.spark.connecting import endpoint_of
from replicad.spark.database import forget, patiently
from replicad.spark.options import SourceOptions
from replicad.spark.pipeline_config import AVAILABLE_NOW, PipelineConfig

ANSWER = 3.0  # seconds for a connection to a daemon and for its answer
LONGEST_PAUSE = 5.0  # seconds between two tries
PATIENCE = 60.0  # seconds for which a run that ends by itself waits for what cannot be reached
_PROBE_PAUSE = 1.0  # seconds between two looks at the parts while a pipeline ends
_LOOK = 0.2  # seconds between two questions whether the run must end

log = get_logger("replicad.spark")


def wait_until_ready(
    config: PipelineConfig,
    must_end: Callable[[], bool],
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until the daemons have the tube and the databases answer. False if the run must end first.

    Says in one sentence what cannot be reached, after the first try.

    Raises:
        UsageError: TLS on one side only, or a certificate that is not trusted.
        UnknownTube, NotAuthorised, DatabaseRefused: trying again does not help.
        ConnectionLost, DatabaseUnavailable: a run that ends by itself has waited for `PATIENCE` seconds.
    """
    backoff, begun, said = Backoff(0.5, LONGEST_PAUSE, jitter=0.0), now(), ""
    while True:
        try:
            check_daemons(config)
            check_databases(config)
        except (ConnectionLost, DatabaseUnavailable) as error:
            if config.trigger == AVAILABLE_NOW and now() - begun >= PATIENCE:
                raise
            if str(error) != said:
                said = str(error)
                log.warning("waiting", error=said, hint="trying again; is the address right, and does it run?")
        else:
            if said:
                log.info("reached", seconds=round(now() - begun, 1))
            return True
        until = now() + backoff.next_delay()
        while now() < until:
            if must_end():
                return False
            sleep(_LOOK)


def check_daemons(config: PipelineConfig) -> None:
    """Ask every daemon for the tube. Raises as `wait_until_ready`."""
    for options in config.source.by_island().values():
        assert options.tube is not None
        try:
            with endpoint_of(options, timeout=ANSWER).connect("replicad-check") as client:
                client.tube_made(options.tube)
        except ConnectionLost as error:
            _check_tls(options, error)
            raise


def check_databases(config: PipelineConfig) -> None:
    """Connect to every database that has rows. Raises DatabaseRefused or DatabaseUnavailable."""
    for url in dict.fromkeys([config.database, *(rule.database for rule in config.rules if rule.database)]):
        try:
            patiently(url, _ask, patience=0)
        finally:
            forget(url)


def _ask(driver: Any) -> None:
    with driver.cursor() as cursor:
        cursor.execute("SELECT 1")
        cursor.fetchall()


def _check_tls(options: SourceOptions, error: ConnectionLost) -> None:
    """Raise UsageError if only one side wants TLS, or the certificate is not trusted."""
    where = f"the daemon at {options.host}:{options.port}"
    if options.tls_ca is None:
        if speaks_tls(options.host, options.port):
            raise UsageError(
                f"{where} speaks TLS; give the option tlsCa, the file of the authority that signed its certificate, or "
                "`system`"
            ) from error
        return
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        raise UsageError(f"{where} has a certificate that is not trusted: {cause.verify_message}; see tlsCa") from error
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        raise UsageError(f"{where} does not speak TLS; leave the option tlsCa out, or give its TLS port") from error


def speaks_tls(host: str, port: int) -> bool:
    """Whether a server answers a TLS handshake. Nothing is sent beyond it."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is only asked whether it is TLS
    try:
        with socket.create_connection((host, port), timeout=ANSWER) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it wants a certificate of ours, or another version
    except OSError:
        return False


class Watch:
    """Looks, while a pipeline ends, whether the batch in hand can end: `trouble` is what cannot be reached.

    Runs in a thread of its own, because a look may take as long as a connection that nobody answers.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self.trouble: str | None = None
        self._config = config
        self._done = threading.Event()
        threading.Thread(target=self._look, name="replicad-watch", daemon=True).start()

    def close(self) -> None:
        """End the looks."""
        self._done.set()

    def _look(self) -> None:
        while not self._done.is_set():
            try:
                check_daemons(self._config)
                check_databases(self._config)
                self._config.sink.probe()
            except ReplicadError as error:
                self.trouble = str(error)
                return
            self._done.wait(_PROBE_PAUSE)
