"""URLs of a Redis: what they mean, what is wrong with others, and that no password is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicad.config.settings import Address, ServerSettings
from replicad.errors import UsageError
from replicad.redis.link import parse_redis
from replicad.redis.work import announced_address


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://db1", ("db1", 6379, 0, None, None)),
        ("redis://db1/", ("db1", 6379, 0, None, None)),
        ("redis://[::1]:7000/3", ("::1", 7000, 3, None, None)),
        ("redis://:s%40crt@db1/0", ("db1", 6379, 0, None, "s@crt")),
        ("redis://ann:s3cret@db1:6380", ("db1", 6380, 0, "ann", "s3cret")),
        ("redis://ann@db1", ("db1", 6379, 0, "ann", None)),
    ],
)
def test_a_url_says_where_and_who(url: str, expected: tuple[object, ...]) -> None:
    found = parse_redis(url)
    assert (found.host, found.port, found.database, found.user, found.password) == expected
    assert found.tls is None
    assert "s3cret" not in f"{found} {found!r}"
    assert parse_redis(url, password="other").password == (expected[4] or "other")


def test_rediss_is_with_tls_and_checks_the_certificate() -> None:
    found = parse_redis("rediss://db1")
    assert found.tls is not None
    assert found.tls.check_hostname
    assert str(found) == "rediss://db1:6379/0"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://db1", "is no URL of a Redis; give redis://"),
        ("redis://", "is no URL of a Redis"),
        ("redis://db1:x/0", "is no URL of a Redis"),
        ("redis://db1/zero", "the database of a Redis is a number, not 'zero'"),
        ("redis://:s3cret@db1/0?ssl=true", "is no URL of a Redis"),
    ],
)
def test_another_url_is_refused_with_what_to_give_and_without_its_password(url: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_redis(url)
    assert why in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_settings_that_need_a_redis_or_tls_are_refused_without() -> None:
    with pytest.raises(UsageError, match="need --redis URL"):
        ServerSettings(redis_announce=Address("db1", 9009))
    with pytest.raises(UsageError, match="--redis-ca is for a Redis with TLS"):
        parse_redis("redis://db1", ca=Path("ca.pem"))


@pytest.mark.parametrize(
    ("settings", "announced"),
    [
        (ServerSettings(listen=Address("10.0.0.5", 9009)), "10.0.0.5:9009"),
        (ServerSettings(listen=Address("0.0.0.0", 9009)), ""),
        (ServerSettings(listen=Address("::", 9009)), ""),
        (ServerSettings(listen=Address("127.0.0.1", 0)), ""),
        (ServerSettings(listen=Address("0.0.0.0", 9009), redis="redis://r", redis_announce=Address("db1", 1)), "db1:1"),
    ],
)
def test_what_is_announced_can_be_reached(settings: ServerSettings, announced: str) -> None:
    assert announced_address(settings) == announced
