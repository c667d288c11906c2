"""Pipelines in one Python process, without Spark and without a JVM (`engine = "local"`)."""

from __future__ import annotations

from pathlib import Path

from replicad.config.declaring import read_toml, shown_value
from replicad.errors import EnvironmentRefused, UsageError

LOCAL, SPARK = "local", "spark"


def engine_of(path: Path) -> str:
    """The engine that a pipeline's file asks for. Raises UsageError: the file cannot be read."""
    found = read_toml(path)
    run = found.get("run")
    wanted = run.get("engine", SPARK) if isinstance(run, dict) else SPARK
    if wanted not in (LOCAL, SPARK):
        raise UsageError(f"{path}: [run] engine: {shown_value(wanted)} is not valid; give {SPARK} or {LOCAL}")
    if wanted == SPARK and "tables" in found:
        raise UsageError(f'{path}: [tables], for many tables, needs engine = "{LOCAL}" in [run]')
    return str(wanted)


def check_packages() -> None:
    """Raise EnvironmentRefused if packages are missing that the engine needs."""
    try:
        import adbc_driver_postgresql  # noqa: F401, PLC0415
        import pyarrow  # noqa: F401, PLC0415
    except ImportError as error:
        raise EnvironmentRefused(
            f"the package {error.name} is not installed; pip install 'replicad[local]' (for Delta: 'replicad[delta]')"
        ) from error
