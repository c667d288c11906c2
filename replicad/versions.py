"""The version of the installed package. To read it takes a sixth of the start of `replicad ping`, so few do."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("replicad")
