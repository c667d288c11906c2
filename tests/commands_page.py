"""docs/commands.md: every command with its options and their variables; make it anew after a change:

python -m tests.commands_page
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from replicad.cli.app import root
from replicad.terminal.command import SectionOption

PAGE = Path(__file__).parents[1] / "docs/commands.md"
COMMON = ("--debug", "--help", "-h", "--context")  # named once, at the top
HEAD = """# Commands

Made from the program by `make docs`; `replicad COMMAND --help` prints the same.

Every command has `--help` (`-h`), and `--debug`, which shows the traceback of a failure. Commands that work on a
database or query a daemon have `--context NAME` too. [command-line.md](command-line.md) has the exit
statuses and the contexts, and explains which database a command works on.
An option that has a variable can be set by it; the option overrides the variable.
"""


def render() -> str:
    """The whole page."""
    found = list(commands(root, "replicad"))
    shown: dict[str, str] = {}
    index = [f"- [`{path}`]({anchor(path)}): {one.get_short_help_str(200)}" for path, one in found]
    return "\n".join([HEAD, *index, "", *(part for path, one in found for part in section(path, one, shown))])


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command below a group, with the words that call it, groups before what is in them."""
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield f"{path} {name}", found
        if isinstance(found, click.Group):
            yield from commands(found, f"{path} {name}")


def section(path: str, one: click.Command, shown: dict[str, str]) -> Iterator[str]:
    """The lines about one command. `shown`: the tables of options so far, and the command that each belongs to."""
    context = click.Context(one, info_name=path)
    yield f"## {path}\n"
    yield f"```\n{path} {' '.join(one.collect_usage_pieces(context))}\n```\n"
    yield from prose(one.help or "")
    yield from prose(one.epilog or "")
    sections: dict[str, list[str]] = {}
    for param in one.get_params(context):
        if not isinstance(param, click.Option) or set(param.opts) & set(COMMON):
            continue
        record = param.get_help_record(context)
        if record is None:
            continue
        name = param.section if isinstance(param, SectionOption) else "Options"
        shape = f"<code>{cell(record[0])}</code>" if "|" in record[0] else f"`{record[0]}`"
        sections.setdefault(name, []).append(f"| {shape} | {variable(param)} | {cell(meaning(param, record[1]))} |")
    for name, rows in sections.items():
        table = "\n".join([f"| {name} | variable | |", "|---|---|---|", *rows, ""])
        if len(rows) > 1 and table in shown:
            yield f"{name}: the options of [`{shown[table]}`]({anchor(shown[table])}).\n"
        else:
            shown[table] = path
            yield table


def cell(text: str) -> str:
    """A text in a table, whatever reads it: a bar in a code span has to be written differently for each of them."""
    return text.replace("<", "&lt;").replace("|", "&#124;")


def anchor(path: str) -> str:
    """The link to the section of a command."""
    return f"#{path.replace(' ', '-')}"


def prose(text: str) -> Iterator[str]:
    """Paragraphs of a help text. Those that click is not to wrap become blocks of code."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = paragraph.splitlines()
        if lines and lines[0] == "\b":
            yield "\n".join(["```", *lines[1:], "```", ""])
        elif lines:
            yield f"{' '.join(lines)}\n"


def variable(param: click.Option) -> str:
    """The variable that an option can be set by, or nothing."""
    made = param.key if isinstance(param, SectionOption) else None
    found = made.variable if made is not None else param.envvar
    return f"`{found}`" if isinstance(found, str) else ""


def meaning(param: click.Option, text: str) -> str:
    """What the help says of the option, and what the declaration says besides."""
    made = param.key if isinstance(param, SectionOption) else None
    return text if made is None or not made.more else text.replace(made.help, f"{made.help} {made.more}", 1)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
