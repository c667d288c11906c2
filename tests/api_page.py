"""docs/api.md: what programs may import, made from the docstrings; `make docs` makes it anew after a change.

The code is read and not run: griffe finds signatures and docstrings, so PySpark or Postgres need not be there. A name
that `replicad` exports is described with the package that it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import cast

import griffe

from tests.collector import uncollected

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/api.md"

FACES = (
    "replicad.client",
    "replicad.streams",
    "replicad.tubes",
    "replicad.presence",
    "replicad.caches",
    "replicad.sharding",
    "replicad.sender",
    "replicad.spark",
    "replicad.spark.pipeline",
    "replicad.spark.sinks",
    "replicad.postgres",
    "replicad.protocol.tokens",
    "replicad.errors",
)
"""The packages and modules that export names, in the order of the page."""

# Classes whose instances a program gets from a function or a method, and does not make by itself.
_MADE_FOR_YOU = {
    "AsyncClient", "AsyncFollower", "BlockingFollower", "Cache", "Database", "PodAnswer", "PodBatch",
    "PresenceReporter", "ShardedWriter", "Writer",
}  # fmt: skip
_DESCRIBED = {
    "WholeRequest": "{}",
    "PodRequest": "PodAnswer[{}]",
}  # what `ClientRequests` describes, and its result

_HEAD = """\
<!-- `make docs` makes this page from the docstrings. -->

# Python names

Programs may import the names on this page. [CHANGELOG.md](../CHANGELOG.md) says what may change. All other names are
internal. Import what most programs need from `replicad`, and the rest from the package that has it.

The methods of the two clients are the same. What a method of the blocking client returns comes out of an `await` in the
async client, and what it iterates over comes out of an `async for`; lists of pods are a `PodBatch` there.

## `replicad`

"""


@cache
def tree() -> griffe.Module:
    """The whole package as it is written."""
    with uncollected():
        return cast(griffe.Module, griffe.load("replicad", search_paths=[ROOT], allow_inspection=False))


def exported(face: str) -> dict[str, griffe.Object]:
    """What a package exports, by name, sorted; a module without `__all__` exports its public classes and functions."""
    module = find(face)
    names = module.exports or [n for n, one in module.members.items() if _is_own(one)]
    return {str(name): _target(module[str(name)]) for name in sorted(map(str, names))}


def find(path: str) -> griffe.Object:
    """A module or an object by its dotted name."""
    return tree() if path == "replicad" else _target(tree()[path.removeprefix("replicad.")])


def render() -> str:
    """The page."""
    return "\n".join([_HEAD + _overview(), *map(_section, FACES)])


def _overview() -> str:
    homes = {one.path: face for face in reversed(FACES) for one in exported(face).values()}
    lines = ["| name | from | |", "|---|---|---|"]
    for name, one in exported("replicad").items():
        lines.append(f"| `{name}` | `{homes[one.path]}` | {_summary(one)} |")
    return "\n".join([*lines, ""])


def _section(face: str) -> str:
    shown: dict[str, str] = {}
    parts = [f"## `{face}`", _text(find(face)).split("\n\n", maxsplit=1)[0]]
    for name, one in exported(face).items():
        parts.append(f"### `{name}`")
        parts += _described(name, one, shown)
    return "\n\n".join(parts) + "\n"


def _described(name: str, one: griffe.Object, shown: dict[str, str]) -> Iterator[str]:
    """The parts of one name; `shown` has the methods of the section so far, by path, with their class."""
    if isinstance(one, griffe.Function):
        yield _code(_signature(name, one))
    elif isinstance(one, griffe.Attribute):
        yield _code(f"{name} = {one.value}")
    if _text(one):
        yield _text(one)
    if isinstance(one, griffe.Class):
        if name not in _MADE_FOR_YOU and (how := _constructor(name, one)):
            yield _code(how)
        for attribute in _properties(one):
            yield _code(f"{attribute.name}: {attribute.annotation}")
            if _text(attribute):
                yield _text(attribute)
        methods = _methods(one)
        for method in methods:
            if method.path not in shown:
                yield _code(_signature(method.name, method))
                if _text(method):
                    yield _text(method)
        others = dict.fromkeys(shown[method.path] for method in methods if method.path in shown)
        if others:
            yield f"And the methods that `{'`, `'.join(others)}` has."
        shown |= {method.path: name for method in methods if method.path not in shown}


def _constructor(name: str, one: griffe.Class) -> str | None:
    if any("NamedTuple" in str(base) for base in one.bases):
        fields = [f"{each.name}: {each.annotation}{_default(each)}" for each in _annotated(one)]
        return _lines(name, fields, "") if fields else None
    made = one.all_members.get("__init__")
    function = _target(made) if made is not None else None
    return _signature(name, function) if isinstance(function, griffe.Function) else None


def _methods(one: griffe.Class) -> list[griffe.Function]:
    targets = [_target(member) for name, member in one.all_members.items() if not name.startswith("_")]
    return [method for method in targets if isinstance(method, griffe.Function)]


def _annotated(one: griffe.Class) -> list[griffe.Attribute]:
    members = [member for name, member in one.members.items() if not name.startswith("_")]
    return [each for each in members if isinstance(each, griffe.Attribute) and each.annotation is not None]


def _properties(one: griffe.Class) -> list[griffe.Attribute]:
    return [each for each in _annotated(one) if "property" in each.labels]


def _default(field: griffe.Attribute) -> str:
    return "" if field.value is None else f" = {field.value}"


def _signature(name: str, function: griffe.Function) -> str:
    """`name(arguments) -> result`, on one line, or with an argument on each line where that is too long."""
    parameters = [one for one in function.parameters if one.name not in ("self", "cls")]
    given = [_argument(one) for one in parameters]
    kinds = [one.kind for one in parameters]
    if griffe.ParameterKind.keyword_only in kinds and griffe.ParameterKind.var_positional not in kinds:
        given.insert(kinds.index(griffe.ParameterKind.keyword_only), "*")
    result = "" if function.returns is None or function.name == "__init__" else str(function.returns)
    decorators = {str(one.value) for one in function.decorators}
    if "asynccontextmanager" in decorators:
        return _lines(f"async with {name}", given, f" as {_inner(result)}")
    if "contextmanager" in decorators:
        return _lines(f"with {name}", given, f" as {_inner(result)}")
    awaited = "await " if "async" in function.labels and not result.startswith("AsyncIterator") else ""
    return _lines(awaited + name, given, f" -> {_returned(result)}" if result else "")


def _lines(head: str, given: list[str], tail: str) -> str:
    line = f"{head}({', '.join(given)}){tail}"
    return line if len(line) <= 100 else "\n".join([f"{head}(", *(f"    {one}," for one in given), f"){tail}"])


def _inner(annotation: str) -> str:
    return annotation.partition("[")[2][:-1]


def _returned(annotation: str) -> str:
    described = annotation.partition("[")[0]
    return _DESCRIBED[described].format(_inner(annotation)) if described in _DESCRIBED else annotation


def _argument(one: griffe.Parameter) -> str:
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(one.kind, "")
    shown = f"{stars}{one.name}" + (f": {one.annotation}" if one.annotation is not None else "")
    return shown if one.default is None or stars else f"{shown} = {one.default}"


def _text(one: griffe.Object) -> str:
    return one.docstring.value.strip() if one.docstring is not None else ""


def _summary(one: griffe.Object) -> str:
    first = " ".join(_text(one).split("\n\n", maxsplit=1)[0].split())
    return first.partition(". ")[0].rstrip(".:").replace("|", "\\|")


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _is_own(one: griffe.Object | griffe.Alias) -> bool:
    return not one.is_alias and not one.name.startswith("_") and (one.is_class or one.is_function)


def _target(one: griffe.Object | griffe.Alias) -> griffe.Object:
    return cast(griffe.Object, one.final_target if one.is_alias else one)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
