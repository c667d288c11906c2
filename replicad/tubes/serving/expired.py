"""Reports leases whose holders are silent. Nothing else shows a worker that was killed, until another one claims."""

from __future__ import annotations

from collections.abc import Container, Iterable

from replicad.daemon.troubles import Troubles
from replicad.tubes.holders import without_tags
from replicad.tubes.leases import LeaseView

CODE = "lease_expired"


class ExpiredLeases:
    """The expired leases as troubles of their tubes, which the command line of any machine can read."""

    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles
        self._reported: set[tuple[str, str]] = set()  # tube and cause

    def report(self, leases: Iterable[LeaseView], tubes: Container[str]) -> None:
        """Take all present leases: begin a trouble for each one that has expired, end those that are over."""
        expired = {(one.tube, _cause(one)): one for one in leases if one.expired and one.tube in tubes}
        for tube, cause in self._reported - expired.keys():
            self._troubles.end("tube", tube, cause)
        for (tube, cause), lease in expired.items():
            self._troubles.begin("tube", tube, cause, _sentence(lease), code=CODE)
        self._reported = set(expired)


def _cause(lease: LeaseView) -> str:
    return f"lease {lease.partition}/{lease.partitions}"


def _sentence(lease: LeaseView) -> str:
    return (
        f"partition {lease.partition}/{lease.partitions}: {without_tags(lease.holder)} has not renewed its lease of "
        f"{lease.ttl:g} s. It was stopped, was killed, hangs or cannot reach a daemon; start a worker"
    )
