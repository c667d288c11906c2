"""`replicad access`: checks an access file, says what it allows, and makes secrets. It needs no daemon."""

from __future__ import annotations

import os
import secrets
import time
from hashlib import sha256
from pathlib import Path

import click

from replicad.config.access import READ, Client, Part, Verbs, parse_name, parse_part, part_text, read_access
from replicad.config.browser_tokens import AUDIENCE, LIFE, Claims, sign
from replicad.config.declaring import WHOLE
from replicad.errors import EnvironmentRefused, UsageError
from replicad.terminal.command import ReplicadGroup, ValueType, option
from replicad.terminal.output import echo

_BYTES = 32  # of randomness in a secret: 43 characters


def _verbs() -> Verbs:
    from replicad.daemon.access import verbs_of
    from replicad.features import served
    from replicad.protocol.commands import CORE

    features = served()
    commands = [kind for feature in features for kind in feature.commands]
    return verbs_of([*CORE, *commands], features)


@click.group("access", cls=ReplicadGroup, short_help="Check access files and make secrets.")
def command() -> None:
    """Check an access file, ask what it allows, and make secrets for its clients (docs/access.md)."""


@command.command("check", short_help="Check an access file.")
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Check an access FILE as the daemon does, and list its clients. Exit status 2 if the daemon would refuse it."""
    found = read_access(file, _verbs(), "replicad access check")
    for client in found.clients.values():
        echo(f"{client.name}: {_proofs(client)}; may {', '.join(map(str, client.allow)) or 'do nothing'}{_not(client)}")


@command.command(
    "test",
    short_help="Ask whether a client may do something.",
    epilog="""\b
Examples:
  replicad access test billing read orders --access-file access.toml
  replicad access test billing relay""",
)
@click.argument("client")
@click.argument("verb")
@click.argument("name", metavar="[OBJECT]", required=False)
@option(
    "--access-file",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    envvar="REPLICAD_ACCESS_FILE",
    required=True,
    help="The access file. Also REPLICAD_ACCESS_FILE.",
)
def test(client: str, verb: str, name: str | None, file: Path) -> int:
    """Say whether CLIENT may do VERB to OBJECT, the name of a stream or tube. Exit status 0 if it may, 1 if not."""
    verbs = _verbs()
    found = read_access(file, verbs).clients.get(client)
    if found is None:
        raise UsageError(f"{file} has no [client.{client}]")
    if verb not in verbs.named | verbs.plain:
        raise UsageError(f"there is no verb {verb!r}; the verbs are {', '.join(sorted(verbs.named | verbs.plain))}")
    if (name is None) == (verb in verbs.named):
        raise UsageError(f"{verb} needs the name of a stream or tube" if name is None else f"{verb} takes no name")
    allowed = found.may(verb, name)
    parts = found.parts(name) if verb == READ and name is not None and not allowed else ()
    only = f", but only where {' or '.join(map(part_text, parts))}" if parts else ""
    may = "may" if allowed or parts else "may not"
    echo(f"{client} {may} {' '.join(filter(None, (verb, name)))}{only}: {_why(found, verb, name)}")
    return 0 if allowed or parts else 1


@command.command("token", short_help="Make a secret for a client.")
@click.argument("client")
@option(
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the secret to a new file that only its owner can read, instead of printing it.",
)
def token(client: str, out: Path | None) -> None:
    """Make a secret for CLIENT and the line for its table in the access file, which has only the SHA-256 of it.

    The secret is the word of AUTH and the content of the client's --token-file. The access file has only its hash.
    """
    parse_name(client)
    secret = secrets.token_urlsafe(_BYTES)
    _give(f"{client}.{secret}", out)
    echo(f'token_sha256 = ["{sha256(secret.encode()).hexdigest()}"]')


@command.command(
    "browser-token",
    short_help="Make a token for a browser, for trying.",
    epilog="""\b
Example:
  openssl rand -hex 32 > browser.key; chmod 600 browser.key
  replicad access browser-token alice 'orders*' --key browser.key""",
)
@click.argument("subject")
@click.argument("streams", nargs=-1, required=True, metavar="STREAM...")
@option(
    "--key",
    metavar="FILE",
    type=click.Path(path_type=Path),
    required=True,
    help="The secret that --browser-key of the daemon names, or the private key (PEM) of its public key.",
)
@option(
    "--minutes", type=ValueType(WHOLE, 1, int(LIFE) // 60), default=15, show_default=True, help="How long it is valid."
)
@option(
    "--filter",
    "part",
    metavar="COLUMN=VALUE",
    help="Read no more than the changes with this value of a filter column (`streams add --filter`).",
)
@option("--audience", metavar="NAME", default=AUDIENCE, show_default=True, help="replicad, or the name of one daemon.")
@option(
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the token to a new file that only its owner can read, instead of printing it.",
)
def browser_token(
    subject: str,
    streams: tuple[str, ...],
    *,
    key: Path,
    minutes: int,
    part: str | None,
    audience: str,
    out: Path | None,
) -> None:
    """Make a token with which a page reads STREAMs (names or patterns) as SUBJECT, for trying. Your own program makes
    the tokens of your users, with any library for JSON Web Tokens (docs/access.md).
    """
    claims = Claims(subject, streams, int(time.time()) + 60 * minutes, part=None if part is None else _part(part))
    _give(sign(claims, key, audience), out)


def _part(text: str) -> Part:
    try:
        return parse_part(text)
    except ValueError as error:
        raise UsageError(f"--filter {text[:80]!r} is no part of a stream: {error}") from None


def _give(word: str, out: Path | None) -> None:
    if out is None:
        echo(word)
    else:
        _write(out, f"{word}\n")


def _write(file: Path, text: str) -> None:
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
            output.write(text)
    except OSError as error:
        raise EnvironmentRefused(f"--out {file} cannot be written: {error.strerror}") from error


def _proofs(client: Client) -> str:
    proofs = [f"{len(client.digests)} secret{'s' * (len(client.digests) > 1)}"] if client.digests else []
    proofs += [f"certificate {name}" for name in sorted(client.certificates)]
    return " or ".join(proofs) + (f" from {', '.join(map(str, client.networks))}" if client.networks else "")


def _not(client: Client) -> str:
    return f", but not {', '.join(map(str, client.deny))}" if client.deny else ""


def _why(client: Client, verb: str, name: str | None) -> str:
    denied = client.denied_by(verb, name)
    if denied is not None:
        return f'deny has "{denied}"'
    allowed = next((rule for rule in client.allow if rule.covers(verb, name)), None)
    if allowed is not None:
        return f'allow has "{allowed}"'
    return "another right on the name gives it" if client.may(verb, name) else "no line of allow covers it"
