"""The two clients side by side: the same names, parameters and defaults, and no request that is written twice."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from replicad.client.async_client import AsyncClient, AsyncFollower, open_client
from replicad.client.blocking_client import BlockingClient, BlockingFollower
from replicad.client.blocking_client import open_client as open_blocking_client
from replicad.client.requests import ClientRequests, _Method

BOTH = ((BlockingClient, AsyncClient), (BlockingFollower, AsyncFollower))
OWN = {"follow", "close"}  # what each client defines by itself; all else is a request of `ClientRequests`
REQUESTS = {name for name, value in vars(ClientRequests).items() if isinstance(value, _Method)}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def parameters(function: Any) -> list[tuple[str, object, object, str]]:
    signature = inspect.signature(function)
    return [(one.name, one.kind, one.default, one.annotation) for one in signature.parameters.values()]


@pytest.mark.parametrize(("blocking", "on_trio"), BOTH)
def test_both_have_the_same_names_with_the_same_parameters_and_docstrings(blocking: type, on_trio: type) -> None:
    assert public(blocking) == public(on_trio)
    for name in public(blocking):
        assert parameters(getattr(blocking, name)) == parameters(getattr(on_trio, name)), name
        assert inspect.getdoc(getattr(blocking, name)), name


def test_every_request_is_declared_once() -> None:
    assert len(REQUESTS) > 10
    assert public(BlockingClient) == REQUESTS | OWN
    for name in REQUESTS:
        assert getattr(BlockingClient, name) is getattr(AsyncClient, name), name


def test_both_are_opened_in_the_same_way() -> None:
    of_urls = {"port", "daemon"}  # only the client on trio takes a URL, which has no port
    blocking, on_trio = (
        [one for one in parameters(function) if one[0] not in of_urls]
        for function in (open_blocking_client, open_client)
    )
    assert blocking == on_trio


def test_a_method_looks_like_one_that_is_written_out() -> None:
    client = BlockingClient("127.0.0.1", 1, name="a test")
    assert client.tube.__name__ == "tube"
    assert client.tube.__doc__ == "The tube's number of partitions. Raises UnknownTube."
    assert list(inspect.signature(client.tube).parameters) == ["tube"]
    with pytest.raises(TypeError, match="tubes"):
        client.tube(tubes="cities")  # type: ignore[call-arg]
