"""The version of the installed package. To read it takes a sixth of the start of `replicad ping`, so few do."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("replicad")
except PackageNotFoundError:  # the clients are installed alone; both have the same version
    __version__ = version("replicad-client")
