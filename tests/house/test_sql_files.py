"""SQL and its users fit: each query is used, and each query and function that the code uses is there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from replicad.postgres import schema, schema_text
from replicad.postgres.statements import read_queries
from tests.source import IN_ONE_PROCESS, PACKAGE, ROOT, constants, modules

pytestmark = IN_ONE_PROCESS

PAGES = [ROOT / "README.md", ROOT / "protocol.md", *(ROOT / "docs").rglob("*.md")]
LOADERS = ("load_sql", "statement")  # functions whose first argument is the name of a query
# Functions that call an SQL function, and where among their arguments its name is.
CALLERS = {"call_rows": 2, "call_row": 2, "call_value": 2, "rows_call": 1, "value_call": 1, "Ask": 0, "_write": 0}
FUNCTION = re.compile(r"^CREATE\s+(?:OR\s+REPLACE\s+)?(?:FUNCTION|PROCEDURE)\s+(\w+)", re.MULTILINE)
NO_CALL = re.compile(r"--[^\n]*|^COMMENT ON [^;]*;|^(?:GRANT|REVOKE) [^;]*;", re.MULTILINE)

QUERIES = read_queries(sorted(PACKAGE.glob("*/sql/query/*.sql")))


def arguments(places: Mapping[str, int]) -> set[str]:
    """The texts that stand at those places among the arguments of the functions of those names."""
    found = set()
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                given = node.args[places[name] : places[name] + 1] if name in places else []
                found |= {one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


@cache
def installed() -> dict[Path, str]:
    """The files that are run at an installation, and their texts."""
    return {part.folder / name: text for part in schema.PARTS.values() for name, text in schema_text.files(part.name)}


def test_every_query_is_named_by_the_code() -> None:
    assert [name for name in QUERIES if name not in constants()] == [], "nothing loads these queries of sql/query"


def test_every_query_that_the_code_names_is_in_a_file() -> None:
    names = arguments(dict.fromkeys(LOADERS, 0))
    assert len(names) > 20
    assert sorted(names - set(QUERIES)) == [], "there is no such query in sql/query"


def test_no_query_is_a_mere_call() -> None:
    mere = re.compile(r"SELECT (\* FROM )?\{schema\}\.\w+\((\$\d(, )?)*\)\s*")
    assert [name for name, text in QUERIES.items() if mere.fullmatch(text)] == [], "use call_value"


def test_every_function_that_the_code_calls_is_installed() -> None:
    names = arguments(CALLERS)
    assert len(names) > 60
    known = {name for text in installed().values() for name in FUNCTION.findall(text)} | {"set_config", "to_regclass"}
    assert sorted(names - known) == [], "no part installs these functions"


def test_every_function_of_the_schema_is_called_or_documented() -> None:
    texts = [*installed().values(), *QUERIES.values()]
    used = "\n".join([*(NO_CALL.sub("", text) for text in texts), *constants()])
    words = Counter(re.findall(r"\w+", used))
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    older = called_by_older_programs()
    idle = []
    for text in installed().values():
        for name in FUNCTION.findall(text):
            if words[name] <= 1 and name not in pages and name not in older:  # one word is its creation
                idle.append(name)
    assert idle == [], "nothing calls these functions and no page names them"


def called_by_older_programs() -> set[str]:
    """The functions of released versions that the present version serves."""
    return {
        name
        for part, declared in schema.PARTS.items()
        for version, names in schema_text.released(part).items()
        if version >= declared.serves
        for name in names.routines
    }
