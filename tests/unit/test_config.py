"""Settings: what is accepted, what is refused and with which words, and that no secret shows."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.config.declaring import seconds, settings_of, size, whole_number
from replicad.config.limits import Limits
from replicad.config.settings import (
    Address,
    ClientSettings,
    DatabaseSettings,
    LogSettings,
    ServerSettings,
    colour_allowed,
    default_server_name,
    parse_address,
    read_settings,
)
from replicad.errors import UsageError

hosts = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{2,8}){0,3}", fullmatch=True),
)
ports = st.integers(0, 65535)


@given(hosts, ports)
def test_every_address_reads_back_from_its_own_text(host: str, port: int) -> None:
    address = Address(host, port)
    assert parse_address(str(address)) == address


@given(st.text(max_size=60))
def test_whatever_is_accepted_as_an_address_renders_to_the_same_address(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError:
        return
    assert 0 <= address.port <= 65535
    assert address.host
    assert not set(address.host) & set(" /@[]\n\0")
    assert parse_address(str(address)) == address
    if ":" in address.host:
        ipaddress.IPv6Address(address.host)


@pytest.mark.parametrize(
    "text",
    ["", "9009", ":9009", "localhost", "localhost:", "localhost:-1", "localhost:65536", "::1:9009", "[::1]", "[zz]:1",
     "tcp://localhost:9009", "a b:1", "user@host:1", "localhost:9009 ", "localhost:٣", "[1.2.3.4]:5"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(give|a port|.* is not an IPv6)"):
        parse_address(text)


def test_command_line_goes_before_environment_before_file_before_default(tmp_path: Path) -> None:
    file = tmp_path / "replicad.toml"
    file.write_text('max_line = "8KiB"\nbell_interval = 0.002\nlisten = "127.0.0.1:1"\nlease_ttl = 7\n')
    environ = {"REPLICAD_LISTEN": "127.0.0.1:2", "REPLICAD_BELL_INTERVAL": "0.003", "REPLICAD_MAX_LINE": ""}
    options = {"listen": "127.0.0.1:3", "bell_interval": None}
    made = read_settings(ServerSettings, options, file=file, environ=environ)
    assert made.listen.port == 3
    assert made.limits.bell_interval == 0.003
    assert made.limits.max_line == 8192  # an empty variable is no value
    assert made.limits.lease_ttl == 7
    assert made.limits.stop_grace == Limits().stop_grace


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        ({"max_line": "12"}, {}, ["--max-line", "12", "4096"]),
        ({}, {"REPLICAD_MAX_LINE": "many"}, ["REPLICAD_MAX_LINE", "'many'", "128KiB"]),
        ({"lease_ttl": "2h"}, {}, ["--lease-ttl", "7200", "3600 seconds"]),
        ({"listen": "9009"}, {}, ["--listen", "'9009'", "HOST:PORT"]),
        ({"database": "mysql://db"}, {}, ["--database", "mysql://db", "postgresql://"]),
        ({"server_name": "two words"}, {}, ["--server-name", "two words"]),
        ({"tube_schema": "x", "stream_schema": "x"}, {}, ["--tube-schema", "--stream-schema", "'x'"]),
        ({"tls_key": "key.pem"}, {}, ["--tls-key", "--tls-cert"]),
        ({"token_file": "/does/not/exist"}, {}, ["--token-file", "/does/not/exist", "No such file"]),
        ({"token_file": "x"}, {"REPLICAD_TOKEN": "y"}, ["REPLICAD_TOKEN", "--token-file"]),
        ({"max_connections": "1e3"}, {}, ["--max-connections", "1e3", "whole number"]),
    ],
)
def test_a_refused_setting_names_its_source_its_value_and_the_remedy(
    options: dict[str, str | None], environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        read_settings(ServerSettings, options, environ=environ)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_made_in_python_are_checked_as_well() -> None:
    with pytest.raises(UsageError, match="--max-connections"):
        Limits(max_connections=0)
    with pytest.raises(UsageError, match="--lease-ttl"):
        replace(Limits(), lease_ttl=3601.0)


def test_every_default_is_within_its_own_range_and_reads_back_from_text() -> None:
    for made in settings_of(ServerSettings):
        if made.default not in (None, ""):
            assert made.read(str(made.default), made.option) == made.default


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_lin = 5", ["max_lin", "did you mean max_line"]),
        ("nonsense = 5", ["nonsense"]),
        ("max_line = [1]", ["max_line"]),
        ("max_line =", ["not TOML"]),
    ],
)
def test_a_bad_configuration_file_is_refused_with_the_reason(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_settings(ServerSettings, {}, file=file, environ={})
    for word in [*words, str(file)] if "max_line = [" not in text else words:
        assert word in str(caught.value)


def test_a_missing_configuration_file_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_settings(ServerSettings, {}, file=Path("/does/not/exist.toml"), environ={})


def test_the_token_comes_from_the_first_line_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret-word\nsecond line\n")
    made = read_settings(ClientSettings, {"token_file": str(file)}, environ={})
    assert made.token == "s3cret-word"
    assert replace(made, server=Address("h", 1)).token == "s3cret-word"


@pytest.mark.parametrize("content", [b"", b"\n", b"two words\n", b"\xff\xfe\n"])
def test_a_file_without_a_token_is_refused_without_showing_its_content(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="--token-file") as caught:
        read_settings(ServerSettings, {"token_file": str(file)}, environ={})
    assert "two words" not in str(caught.value)


def test_no_secret_shows_in_the_text_of_settings_or_of_their_refusal() -> None:
    made = read_settings(
        ServerSettings,
        {"database": "postgresql://u:hunter2@h/d?sslpassword=hunter3"},
        environ={"REPLICAD_TOKEN": "hunter4"},
    )
    assert made.token == "hunter4"
    assert "hunter" not in repr(made)
    assert made.database.shown == "postgresql://u:***@h/d?sslpassword=***"
    with pytest.raises(UsageError) as caught:
        read_settings(ServerSettings, {}, environ={"REPLICAD_TOKEN": "hunter 5"})
    assert "hunter" not in str(caught.value)
    with pytest.raises(UsageError) as caught:
        read_settings(DatabaseSettings, {"database": "mysql://u:hunter6@h/d"}, environ={})
    assert "hunter" not in str(caught.value)


def test_a_secret_has_no_option_on_the_command_line() -> None:
    assert [made.name for made in settings_of(ServerSettings) if made.secret] == [
        "token",
        "redis_password",
    ]


def test_an_unusable_certificate_is_refused_with_its_name(tmp_path: Path) -> None:
    bad = tmp_path / "cert.pem"
    bad.write_text("no certificate")
    with pytest.raises(UsageError, match=r"--tls-cert .*cert\.pem"):
        ServerSettings(tls_cert=bad).ssl_context()
    with pytest.raises(UsageError, match=r"--tls-ca .*cert\.pem"):
        ClientSettings(tls_ca=bad).ssl_context()
    assert ServerSettings().ssl_context() is None
    assert isinstance(ClientSettings(tls_ca=Path("system")).ssl_context(), ssl.SSLContext)


def test_a_client_cannot_connect_to_port_0() -> None:
    with pytest.raises(UsageError, match="port 0"):
        read_settings(ClientSettings, {"server": "localhost:0"}, environ={})


def test_the_default_server_name_is_one_word() -> None:
    assert " " not in default_server_name()
    assert ServerSettings().server_name == default_server_name()


def test_sizes_seconds_and_whole_numbers_have_the_usual_units() -> None:
    assert [size(text) for text in ("0", "7B", "128KiB", "1MiB", "2GB")] == [0, 7, 131072, 1048576, 2 * 10**9]
    assert [seconds(text) for text in ("30", "0.5", "500ms", "2m", "1h", "7d")] == [30, 0.5, 0.5, 120, 3600, 604800]
    assert whole_number("-5") == -5


@given(st.sampled_from([size, seconds, whole_number]), st.text(max_size=20))
def test_a_number_parser_gives_a_finite_number_or_says_no(parse: object, text: str) -> None:
    assert callable(parse)
    try:
        value = parse(text)
    except ValueError:
        return
    assert -(10**30) < value < 10**30


def test_logs_have_four_levels_and_colour_can_be_forbidden() -> None:
    with pytest.raises(UsageError, match="debug, info, warning or error"):
        read_settings(LogSettings, {"log_level": "loud"}, environ={})
    assert read_settings(LogSettings, {}, defaults={"log_level": "warning"}, environ={}).log_level == "warning"
    assert colour_allowed({})
    assert not colour_allowed({"NO_COLOR": "1"})
