"""Declaring settings, and finding their values: command line, then environment, then file, then default.

A setting is a field of a frozen dataclass, made by `setting()`. The declaration gives the option `--max-line`, the
variable `REPLICAD_MAX_LINE`, the key `max_line` of the file, the help text, the check of the value and its message.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from replicad.errors import UsageError
from replicad.masking import mask_secrets
from replicad.reading import MAX_FILE, Unreadable, read_toml_text

T = TypeVar("T")

_KEY = "replicad.setting"
_SECONDS = {"ms": 0.001, "s": 1, "": 1, "m": 60, "h": 3600, "d": 86_400}
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting."""

    name: str
    default: Any
    help: str
    placeholder: str
    parse: Callable[[str], Any]  # raises ValueError with what to give instead
    minimum: float | None = None
    maximum: float | None = None
    unit: str = ""
    group: str = ""  # the topic under which `--help` lists it; else GROUP of the class
    more: str = ""  # what docs/commands.md says besides `help`
    on_command_line: bool = True  # False for secrets: every user of the machine can see a command line
    is_flag: bool = False  # an option without a value

    @property
    def option(self) -> str:
        """The option's name, such as `--max-line`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable's name, such as `REPLICAD_MAX_LINE`."""
        return "REPLICAD_" + self.name.upper()

    def read(self, text: str, source: str) -> Any:
        """Parse and check the text from `source` (an option, a variable, a key of a file).

        Raises:
            UsageError: with the source, the value and what to give instead.
        """
        try:
            value = self.parse(text)
        except ValueError as error:
            shown = repr(mask_secrets(text)) if self.on_command_line else "the value"
            raise UsageError(f"{source}: {shown} is not valid; {error}") from None
        self.check(value, source)
        return value

    def check(self, value: Any, source: str) -> None:
        """Raise UsageError if a number is out of its range."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        low, high = self.minimum, self.maximum
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"from {plain(low or 0)}" + ("" if high is None else f" to {plain(high)}")
            raise UsageError(f"{source}: {plain(value)} is out of range; give a number {bounds} {self.unit}".rstrip())


def plain(number: float) -> str:
    """The number as people write it: `15` and not `15.0`, never with an exponent."""
    return f"{number:f}".rstrip("0").rstrip(".") if isinstance(number, float) else str(number)


def setting(
    default: T,
    help: str,
    placeholder: str,
    parse: Callable[[str], T],
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    unit: str = "",
    group: str = "",
    more: str = "",
    secret: bool = False,
    in_repr: bool = True,
) -> T:
    """Declare a field of a settings dataclass. `Setting` has the same arguments.

    `secret` keeps the value out of the command line, messages and repr(); `in_repr=False` out of repr() only.
    """
    spec = Setting(
        "", default, help, placeholder, parse, minimum, maximum, unit, group, more, on_command_line=not secret
    )
    made: T = field(default=default, repr=in_repr and not secret, metadata={_KEY: spec})
    return made


def _setting_in(kind: type, entry: Field[Any]) -> Setting:
    spec: Setting = entry.metadata[_KEY]
    return replace(spec, name=entry.name, group=spec.group or getattr(kind, "GROUP", ""))


def settings_of(kind: type, *, nested: bool = True) -> Iterator[Setting]:
    """All settings of a settings dataclass and (`nested`) of the dataclasses inside it, in the order of the fields."""
    for entry in fields(kind):
        if _KEY in entry.metadata:
            yield _setting_in(kind, entry)
        elif nested and is_dataclass(entry.default):
            yield from settings_of(type(entry.default))


def check_ranges(settings: Any, *ordered: tuple[str, str]) -> None:
    """Check all numbers of a settings object, for `__post_init__`.

    `ordered` are pairs of names: the value of the first may not be above that of the second.
    """
    for entry in fields(settings):
        if _KEY in entry.metadata:
            made = _setting_in(type(settings), entry)
            made.check(getattr(settings, entry.name), made.option)
    for less, more in ordered:
        low, high = getattr(settings, less), getattr(settings, more)
        if low > high:
            both = [f"--{name.replace('_', '-')} {plain(value)}" for name, value in ((less, low), (more, high))]
            raise UsageError(f"{' is above '.join(both)}; lower the first or raise the second")


def load(
    kind: type[T], options: Mapping[str, str | None], environ: Mapping[str, str], file: Mapping[str, str] | None = None
) -> T:
    """Build a settings object of `kind` from options by field name (None: not given), the environment and a file.

    An empty variable is ignored. Raises UsageError as `Setting.read`.
    """
    values: dict[str, Any] = {}
    for entry in fields(kind):  # type: ignore[arg-type]
        if _KEY not in entry.metadata:
            if is_dataclass(entry.default):
                values[entry.name] = load(type(entry.default), options, environ, file)
            continue
        made = _setting_in(kind, entry)
        candidates = (
            (made.option, options.get(made.name)),
            (made.variable, environ.get(made.variable) or None),
            (f"{made.name} in the configuration file", (file or {}).get(made.name)),
        )
        for source, text in candidates:
            if text is not None:
                values[made.name] = made.read(text, source)
                break
    return kind(**values)


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


def read_file(path: Path, kind: type) -> dict[str, str]:
    """Read a TOML file of `key = value` lines into texts by setting name.

    Raises:
        UsageError: no such file, not TOML, or a key that is not a setting of `kind`.
    """
    found = read_toml(path, "--config: ")
    known = {made.name: made for made in settings_of(kind)}
    for key, value in found.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; the keys are the long options with _ for -"
            raise UsageError(f"--config: {path} has an unknown key {key!r}{hint}")
        if isinstance(value, (dict, list)) or (isinstance(value, bool) and not known[key].is_flag):
            raise UsageError(f"--config: {key} in {path} must be a text or a number")
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in found.items()}


# --- parsers: text to value, ValueError with what to give instead ---


def text_of(pattern: str, expected: str) -> Callable[[str], str]:
    """A parser for texts that match the whole pattern."""
    compiled = re.compile(pattern)

    def parse(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError(expected)
        return text

    return parse


def whole_number(text: str) -> int:
    """A whole number in plain decimal."""
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
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


def choice_of(*names: str) -> Callable[[str], str]:
    """A parser for one of a few words."""
    listed = ", ".join(names[:-1]) + f" or {names[-1]}"
    return text_of("|".join(map(re.escape, names)), f"give {listed}")


# --- kinds of settings: `setting` with a parser, placeholder and unit ---


def count(default: int, help: str, low: int, high: int, *, group: str = "", more: str = "") -> int:
    """A setting that is a whole number."""
    return setting(default, help, "N", whole_number, minimum=low, maximum=high, group=group, more=more)


def flag(help: str, *, group: str = "", more: str = "") -> bool:
    """A setting that is off unless it is named: an option without a value."""
    spec = Setting("", False, help, "", yes_or_no, group=group, more=more, is_flag=True)
    made: bool = field(default=False, metadata={_KEY: spec})
    return made


def duration(default: float, help: str, low: float, high: float, *, group: str = "", more: str = "") -> float:
    """A setting that is a time in seconds."""
    return setting(default, help, "SECONDS", seconds, minimum=low, maximum=high, unit="seconds", group=group, more=more)


def amount(default: int, help: str, low: int, high: int, *, group: str = "", more: str = "") -> int:
    """A setting that is a number of bytes."""
    return setting(default, help, "BYTES", size, minimum=low, maximum=high, unit="bytes", group=group, more=more)


def choice(default: str, help: str, *names: str, group: str = "", more: str = "") -> str:
    """A setting that is one of a few words."""
    return setting(default, help, "|".join(names), choice_of(*names), group=group, more=more)
