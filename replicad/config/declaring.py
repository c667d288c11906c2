"""Keys: how one is declared, read and refused, wherever its value comes from.

A key is declared once, with its kind, default, range, help and group. A *kind* says what values there are and has the
one parser for them. From the declaration come the options of commands, the variables of the environment, the keys of
TOML files (`serve --config`, contexts, files for `apply`, pipelines), the options of the Spark source, and the tables
of the docs. Whatever is wrong with a value is a UsageError: what was given where, and what to give.

The settings of a command are the fields of a frozen dataclass, made by `setting()`. A value comes from the command
line (`--max-line`), else from the environment (`REPLICAD_MAX_LINE`), else from the file (`max_line`), else from the
declaration.
"""

from __future__ import annotations

import difflib
import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from replicad.errors import UsageError
from replicad.masking import mask_secrets
from replicad.reading import MAX_FILE, Unreadable, read_toml_text

T = TypeVar("T")

_KEY = "replicad.key"
_LONGEST = 80  # characters of a value in a message
_MOST_LISTED = 30  # names in a message
_SECONDS = {"ms": 0.001, "s": 1, "": 1, "m": 60, "h": 3600, "d": 86_400}
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class ValueKind:
    """What values a key may have.

    `expected` ends the sentence "give ...". `parse` reads a text and raises ValueError with such a sentence. `types`:
    those that a value may have in a TOML file; a text goes through `parse` there too, any other value through
    `convert`.
    """

    name: str  # in the tables of the docs
    expected: str
    parse: Callable[[str], Any]
    types: tuple[type, ...] = (str,)
    convert: Callable[[Any], Any] = lambda value: value
    placeholder: str = ""  # in the usage of a command
    unit: str = ""
    words: tuple[str, ...] = ()  # all texts that are valid, if they are few

    def take(self, value: object) -> Any:
        """Read a value of a TOML file. Raises ValueError with what to give."""
        if type(value) not in self.types:
            raise ValueError(f"give {self.expected}")
        return self.parse(value) if isinstance(value, str) else self.convert(value)


@dataclass(frozen=True, slots=True)
class Key:
    """A key, with everything that is known of it. `default` None: there is none, or the help says which."""

    name: str
    kind: ValueKind
    default: Any = None
    help: str = ""
    minimum: float | None = None
    maximum: float | None = None
    group: str = ""  # the topic under which `--help` lists it; else GROUP of the class
    more: str = ""  # what docs/commands.md says besides `help`
    placeholder: str = ""  # in the usage of a command, if not that of the kind
    required: bool = False
    secret: bool = False  # no option, since every user of the machine can see a command line; never in a message

    @property
    def option(self) -> str:
        """The option's name, such as `--max-line`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable's name, such as `REPLICAD_MAX_LINE`."""
        return "REPLICAD_" + self.name.upper()

    @property
    def values(self) -> str:
        """What values it may have, for the tables of the docs."""
        return f"{self.kind.expected} ({self.range})" if self.range else self.kind.expected

    @property
    def range(self) -> str:
        """The range of a number in words, or nothing."""
        if self.minimum is None and self.maximum is None:
            return ""
        high = "" if self.maximum is None else f" to {plain(self.maximum)}"
        return f"from {plain(self.minimum or 0)}{high} {self.kind.unit}".rstrip()

    def read(self, text: str, source: str) -> Any:
        """Read and check a text from `source`: an option, a variable.

        Raises:
            UsageError: with the source, the value and what to give instead.
        """
        return self._checked(self.kind.parse, text, source)

    def take(self, value: object, source: str) -> Any:
        """`read` for a value of a TOML file."""
        return self._checked(self.kind.take, value, source)

    def _checked(self, parse: Callable[[Any], Any], value: Any, source: str) -> Any:
        try:
            found = parse(value)
        except ValueError as error:
            shown = "the value" if self.secret else shown_value(value)
            raise UsageError(f"{source}: {shown} is not valid; {error}") from None
        self.check(found, source)
        return found

    def check(self, value: Any, source: str) -> None:
        """Raise UsageError if a number is out of its range."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        low, high = self.minimum, self.maximum
        if (low is not None and value < low) or (high is not None and value > high):
            raise UsageError(f"{source}: {plain(value)} is out of range; give a number {self.range}")


def plain(number: float) -> str:
    """The number as people write it: `15` and not `15.0`, never with an exponent."""
    return f"{number:f}".rstrip("0").rstrip(".") if isinstance(number, float) else str(number)


def shown_value(value: object) -> str:
    """A value in a message, without a password and of bounded length."""
    if isinstance(value, str):
        text = repr(mask_secrets(value))
    else:
        text = mask_secrets(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


# --- names that are not known ---


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that was probably meant; `likeness` from 0 to 1."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return near[0] if near else None


def meant(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a sentence about a name that is not known: the one that was probably meant, or all that there are.

    `otherwise` takes the place of the list.
    """
    names = list(known)
    near = nearest(name, names)
    if near is not None:
        return f"did you mean {near}?"
    listed = ", ".join(names[:_MOST_LISTED]) + (", ..." if len(names) > _MOST_LISTED else "")
    return otherwise or (f"there are {listed}" if names else "there is none")


def not_known(place: str, name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The sentence about a name that is not known; `place` says where it is, and ends with the name."""
    return f"{place} is not known; {meant(name, known, otherwise)}"


def read_table(
    found: Mapping[str, Any], keys: Sequence[Key], place: Callable[[str], str], fault: Callable[[str], None]
) -> dict[str, Any]:
    """The values of a table of a TOML file by key, without those that it does not have.

    `place` gives the words for a key in messages. `fault` is called with a sentence for each mistake: a key is unknown
    or missing, or a value is not valid. It may raise.
    """
    known = {key.name: key for key in keys}
    for name in found:
        if name not in known:
            fault(not_known(place(name), name, known))
    values = {}
    for key in keys:
        if key.name in found:
            try:
                values[key.name] = key.take(found[key.name], place(key.name))
            except UsageError as error:
                fault(str(error))
        elif key.required:
            fault(f"{place(key.name)} is missing; give {key.kind.expected}")
    return values


def refuse(sentence: str) -> NoReturn:
    """Raise UsageError: for `read_table`, if the first mistake ends the reading."""
    raise UsageError(sentence)


# --- settings: keys that are the fields of a dataclass ---


def setting(
    default: T,
    help: str,
    kind: ValueKind,
    placeholder: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    group: str = "",
    more: str = "",
    secret: bool = False,
    in_repr: bool = True,
    name: str = "",
    **metadata: object,
) -> T:
    """Declare a field of a settings dataclass. `Key` has the same arguments.

    `in_repr=False` keeps the value out of repr(), as `secret` does. `name`: that of the key, if the field has another.
    `metadata` is kept with the field.
    """
    made = Key(name, kind, default, help, minimum, maximum, group, more, placeholder, secret=secret)
    found: T = field(default=default, repr=in_repr and not secret, metadata={_KEY: made, **metadata})
    return found


def key_of(kind: type, entry: Field[Any]) -> Key | None:
    """The key that a field of a settings dataclass declares; None: it declares none."""
    made: Key | None = entry.metadata.get(_KEY)
    if made is None:
        return None
    return replace(made, name=made.name or entry.name, group=made.group or getattr(kind, "GROUP", ""))


def settings_of(kind: type, *, nested: bool = True) -> Iterator[Key]:
    """All keys of a settings dataclass and (`nested`) of the dataclasses inside it, in the order of the fields."""
    for entry in fields(kind):
        made = key_of(kind, entry)
        if made is not None:
            yield made
        elif nested and is_dataclass(entry.default):
            yield from settings_of(type(entry.default))


def check_ranges(settings: Any, *ordered: tuple[str, str]) -> None:
    """Check all numbers of a settings object, for `__post_init__`.

    `ordered` are pairs of names: the value of the first may not be above that of the second.
    """
    for entry in fields(settings):
        made = key_of(type(settings), entry)
        if made is not None:
            made.check(getattr(settings, entry.name), made.option)
    for less, more in ordered:
        low, high = getattr(settings, less), getattr(settings, more)
        if low > high:
            both = [f"--{name.replace('_', '-')} {plain(value)}" for name, value in ((less, low), (more, high))]
            raise UsageError(f"{' is above '.join(both)}; lower the first or raise the second")


def load(
    kind: type[T],
    options: Mapping[str, str | None],
    environ: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> T:
    """Build a settings object of `kind` from options by field name (None: not given), the environment, the values of a
    file, and defaults that replace the declared ones.

    An empty variable is ignored. Raises UsageError as `Key.read`.
    """
    values: dict[str, Any] = {}
    for entry in fields(kind):  # type: ignore[arg-type]
        made = key_of(kind, entry)
        if made is None:
            if is_dataclass(entry.default):
                values[entry.name] = load(type(entry.default), options, environ, file, defaults)
        elif (text := options.get(made.name)) is not None:
            values[entry.name] = made.read(text, made.option)
        elif text := environ.get(made.variable):
            values[entry.name] = made.read(text, made.variable)
        elif file is not None and made.name in file:
            values[entry.name] = made.take(file[made.name], f"{made.name} in the configuration file")
        elif defaults is not None and made.name in defaults:
            values[entry.name] = made.read(defaults[made.name], made.option)
    return kind(**values)


def read_file(path: Path, kind: type) -> dict[str, Any]:
    """The values of a TOML file of `key = value` lines by setting name; `load` reads those that count.

    Raises:
        UsageError: no such file, not TOML, or a key that is not a setting of `kind`.
    """
    found = read_toml(path, "--config: ")
    known = [made.name for made in settings_of(kind)]
    for name in found:
        if name not in known:
            raise UsageError(
                not_known(f"--config: {path}: {name}", name, known, "the keys are the long options with _ for -")
            )
    return found


def read_toml(path: Path, where: str = "") -> dict[str, Any]:
    """The content of a TOML file, for every kind of file that replicad reads.

    Raises:
        UsageError: it cannot be read, or something in it is refused by `replicad.reading`; begins with `where`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise UsageError(f"{where}{path} cannot be read: {error.strerror}") from error
    return parse_toml(data, f"{where}{path}")


def parse_toml(data: bytes, where: str) -> dict[str, Any]:
    """`read_toml` for the content of a file."""
    try:
        return read_toml_text(data)
    except Unreadable as error:
        raise UsageError(f"{where}: {error}") from None


def load_object(path: str, where: str) -> Any:
    """Import `module:name`, for an option with a function or class of the user's.

    Raises:
        UsageError: it cannot be imported; the message begins with `where`.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{where}: {path} cannot be loaded ({error}); write it like my_module:my_name") from error


# --- parsers: text to value, ValueError with what to give instead ---


def whole_number(text: str) -> int:
    """A whole number in plain decimal."""
    if not re.fullmatch(r"-?[0-9]{1,19}", text):
        raise ValueError("give a whole number such as 100")
    return int(text)


def seconds(text: str) -> float:
    """Seconds: `30`, `0.5`, also `500ms`, `2m`, `1h` and `7d`."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|d|)", text)
    if found is None:
        raise ValueError("give seconds such as 30 or 0.5, or 500ms, 2m, 1h, 7d")
    return float(found[1]) * _SECONDS[found[2]]


def yes_or_no(text: str) -> bool:
    """`true` or `false`, also `1`, `0`, `yes` and `no`."""
    found = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())
    if found is None:
        raise ValueError("give true or false")
    return found


def size(text: str) -> int:
    """Bytes: `1048576`, `128KiB`, `1MiB`, `2GB`."""
    found = re.fullmatch(r"([0-9]{1,18})([KMG]iB|[kMG]B|B|)", text)
    if found is None:
        raise ValueError("give bytes such as 1048576, 128KiB or 1MiB")
    return int(found[1]) * _UNITS[found[2]]


def path(text: str) -> Path:
    """A path; `~` is the user's home folder."""
    if not text or "\0" in text:
        raise ValueError("give a path")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("no account of this machine has that home folder; give a path without ~") from None


def _any_text(text: str) -> str:
    if not text:
        raise ValueError("give a text that is not empty")
    return text


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"give {SECONDS.expected}")
    return float(number)


# --- kinds ---

TEXT = ValueKind("text", 'a text in quotes, such as "abc"', _any_text)
WHOLE = ValueKind("whole number", "a whole number such as 100", whole_number, (int,), placeholder="N")
SECONDS = ValueKind(
    "seconds",
    "seconds such as 30 or 0.5, or 500ms, 2m, 1h, 7d",
    seconds,
    (str, int, float),
    _finite,
    placeholder="SECONDS",
    unit="seconds",
)
BYTES = ValueKind("bytes", "bytes such as 1048576, 128KiB or 1MiB", size, (str, int), placeholder="BYTES", unit="bytes")
FLAG = ValueKind("flag", "true or false", yes_or_no, (bool,))
PATH = ValueKind("path", "a path", path, placeholder="FILE")


def parsed(name: str, expected: str, parse: Callable[[str], Any], placeholder: str = "") -> ValueKind:
    """A kind whose texts this function reads. It raises ValueError with what to give."""
    return ValueKind(name, expected, parse, placeholder=placeholder)


def matching(pattern: str, expected: str, placeholder: str = "") -> ValueKind:
    """A kind of texts that match the whole pattern."""
    compiled = re.compile(pattern)

    def parse(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError(f"give {expected}")
        return text

    return ValueKind("text", expected, parse, placeholder=placeholder)


def one_of(*words: str, any_case: bool = False) -> ValueKind:
    """A kind of a few words. `any_case`: small and capital letters are alike."""
    listed = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    by_text = {word.lower() if any_case else word: word for word in words}

    def parse(text: str) -> str:
        found = by_text.get(text.lower() if any_case else text)
        if found is None:
            raise ValueError(f"give {listed}")
        return found

    return ValueKind("word", listed, parse, placeholder="|".join(words), words=words)


# --- kinds that only TOML has ---


def _refuser(expected: str) -> Callable[[str], NoReturn]:
    def parse(_text: str) -> NoReturn:
        raise ValueError(f"give {expected}")

    return parse


def only_toml(
    name: str, expected: str, types: tuple[type, ...], fits: Callable[[Any], bool] = lambda _: True
) -> ValueKind:
    """A kind of values that no single text can be: lists and tables. `fits` looks inside of them."""

    def convert(value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"give {expected}")
        return value

    return ValueKind(name, expected, _refuser(expected), types, convert)


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(one, str) and one for one in values)


NAMES = only_toml("list of texts", 'a list of texts, such as ["a", "b"]', (list,), _are_texts)
TEXTS = replace(NAMES, convert=lambda value: tuple(sorted(set(NAMES.convert(value)))))  # in no order and each once
TABLE_OF_TEXTS = only_toml(
    "texts by name", 'texts by name, such as {region = "eu"}', (dict,), lambda value: _are_texts(value.values())
)
TABLES = only_toml(
    "tables by name",
    "a table for each name",
    (dict,),
    lambda value: all(isinstance(one, dict) for one in value.values()),
)


# --- fields of the most frequent kinds ---


def count(default: int, help: str, low: int, high: int, *, group: str = "", more: str = "") -> int:
    """A setting that is a whole number."""
    return setting(default, help, WHOLE, minimum=low, maximum=high, group=group, more=more)


def flag(help: str, *, group: str = "", more: str = "") -> bool:
    """A setting that is off unless it is named: an option without a value."""
    return setting(False, help, FLAG, group=group, more=more)


def duration(default: float, help: str, low: float, high: float, *, group: str = "", more: str = "") -> float:
    """A setting that is a time in seconds."""
    return setting(default, help, SECONDS, minimum=low, maximum=high, group=group, more=more)


def amount(default: int, help: str, low: int, high: int, *, group: str = "", more: str = "") -> int:
    """A setting that is a number of bytes."""
    return setting(default, help, BYTES, minimum=low, maximum=high, group=group, more=more)


def choice(default: str, help: str, *words: str, group: str = "", more: str = "") -> str:
    """A setting that is a word of a fixed set."""
    return setting(default, help, one_of(*words), group=group, more=more)
