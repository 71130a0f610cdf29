"""Layer over layer to one Config, with each value's origin. Later wins: defaults, parents, preset, --config file, command line.

Every problem in every layer is collected and raised as one TitanError, so that a person mends them in one go.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli
from pydantic import ValidationError

from titan_cli.config import presets
from titan_cli.config.dump import toml_value
from titan_cli.config.locate import key_lines
from titan_cli.config.options import Option, nearest, options
from titan_cli.config.schema import Config
from titan_cli.errors import TitanError

Layer = Literal["default", "extends", "preset", "config", "command line"]


@dataclass(frozen=True)
class Origin:
    """Where a value was set. file and line are None for defaults and the command line."""

    layer: Layer
    file: str | None = None
    line: int | None = None

    @property
    def place(self) -> str:
        """As editors and terminals link it: file:line."""
        return f"{self.file}:{self.line}" if self.file else self.layer

    def __str__(self) -> str:
        return f"{self.layer} {self.place}" if self.file else self.layer


@dataclass(frozen=True)
class Loaded:
    """A configuration and the origin of each of its values, by key ("training.steps")."""

    config: Config
    origins: dict[str, Origin]


@dataclass(frozen=True)
class _Source:
    """One file's own values (or the command line's): sections of names, not yet checked."""

    layer: Layer
    file: str | None
    values: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    def origin(self, *path: str) -> Origin:
        return Origin(self.layer, self.file, self.lines.get(path) or self.lines.get(path[:1]))


def load(preset: str | None = None, config_file: str | None = None, overrides: Sequence[str] = ()) -> Loaded:
    """The layers as one frozen Config. `preset` is a name or a path ending in .toml; overrides are `section.key=value`.

    Raises TitanError with every problem of every layer.
    """
    problems: list[str] = []
    sources: list[_Source] = []
    if preset is not None and (path := _find(preset, Path(), "", problems)):
        sources += _with_parents(path, "preset", problems)
    if config_file is not None:
        sources += _with_parents(Path(config_file).expanduser(), "config", problems)
    for source in sources:
        problems += _check(source)
    sources.append(_command_line(overrides, problems))
    problems += _check(sources[-1])
    if problems:
        hint = "`titan options` lists every key, `titan presets ls` every preset."
        raise TitanError("\n".join(dict.fromkeys(problems)), hint=hint)

    merged: dict[str, dict[str, Any]] = {}
    origins = {key: Origin("default") for key in options()}
    for source in sources:
        for section, values in source.values.items():
            merged.setdefault(section, {}).update(values)
            origins |= {f"{section}.{name}": source.origin(section, name) for name in values}
    return Loaded(Config.model_validate(merged), origins)


def _find(name: str, beside: Path, where: str, problems: list[str]) -> Path | None:
    try:
        return presets.find(name, beside)
    except TitanError as error:
        problems.append(f"{where}{error.message}\n    {error.hint}")
        return None


def _with_parents(path: Path, layer: Layer, problems: list[str]) -> list[_Source]:
    """A file after all files that it extends, each once: what a child says is never undone by a parent that two share."""
    sources: dict[Path, _Source | None] = {}  # None: cannot be read, and has been reported

    def visit(path: Path, layer: Layer, trail: list[Path]) -> None:
        real = path.resolve()
        source = _read(path, layer, problems)
        for parent in _parents(source, problems) if source else []:
            where = f"{source.origin('extends').place}: " if source else ""
            found = _find(parent, path.parent, where, problems)
            if found and found.resolve() in [*trail, real]:
                circle = " -> ".join(map(presets.shown, [*trail, real, found]))
                problems.append(f"{where}extends goes in a circle: {circle}\n    Remove one of these steps.")
            elif found and found.resolve() not in sources:
                visit(found, "extends", [*trail, real])
        sources[real] = source

    visit(path, layer, [])
    return [source for source in sources.values() if source]


def _read(path: Path, layer: Layer, problems: list[str]) -> _Source | None:
    file = presets.shown(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
        return _Source(layer, file, tomli.loads(text), key_lines(text))
    except tomli.TOMLDecodeError as error:
        problems.append(
            f"{file}:{error.lineno}: not valid TOML: {error.msg} (column {error.colno})\n"
            "    Text stands in quotes, true and false are lower case, each key stands once in its [section]."
        )
    except UnicodeDecodeError as error:
        problems.append(f"{file}: not UTF-8 (byte {error.start}): save it as UTF-8")
    except OSError as error:
        problems.append(f"{file}: cannot be read: {error.strerror}")
    return None


def _parents(source: _Source, problems: list[str]) -> list[str]:
    """Takes `extends` out of the source's values."""
    parents = source.values.pop("extends", [])
    if isinstance(parents, list) and all(isinstance(parent, str) for parent in parents):
        return parents
    problems.append(
        f'{source.origin("extends").place}: extends must be a list of text, not {_said(parents)}\n    Write extends = ["NAME"].'
    )
    return []


def _command_line(overrides: Sequence[str], problems: list[str]) -> _Source:
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, raw = override.partition("=")
        option = options().get(key)
        if option is None:
            problems.append(_unknown("command line", key))
        elif not equals:
            problems.append(f"command line: {key} needs a value\n    Write {key}=VALUE. {option}")
        else:
            section, _, name = key.partition(".")
            try:
                values.setdefault(section, {})[name] = _value(option, raw)
            except ValueError:
                problems.append(_refused("command line", option, raw))
    return _Source("command line", None, values, {})


def _value(option: Option, raw: str) -> Any:
    """The command line's characters as a value of this option. Raises ValueError if they are neither text nor TOML."""
    if option.is_text or raw in option.words:
        raw.encode()  # bytes that are no UTF-8 reach us as lone surrogates, which no file could hold
        return raw
    values = tomli.loads(f"value = {raw}")
    if len(values) != 1:  # a newline in the shell's word started a second key
        raise ValueError
    return values["value"]


def _check(source: _Source) -> list[str]:
    """What the schema refuses in one source. Each alone: a wrong value is reported even if a later layer replaces it."""
    try:
        Config.model_validate(source.values)
    except ValidationError as error:
        # A value with two possible types has one error for each; the place says it once.
        found = {e["loc"][:2]: e for e in error.errors(include_url=False)}
        return [_problem(source, tuple(map(str, place)), e["type"], e["input"]) for place, e in found.items()]
    return []


def _problem(source: _Source, path: tuple[str, ...], kind: str, value: Any) -> str:
    where = source.origin(*path).place
    if path[-1] == "extends":
        return f"{where}: extends stands above the first [section]\n    Move the line to the top of the file."
    if kind == "extra_forbidden":
        return _unknown(where, ".".join(path), is_section=len(path) == 1 and isinstance(value, dict))
    if len(path) == 1:
        return f"{where}: {path[0]} must be a section, not {_said(value)}\n    Write [{path[0]}] and its keys below."
    return _refused(where, options()[".".join(path)], _said(value))


def _unknown(where: str, key: str, is_section: bool = False) -> str:
    if is_section:
        near = difflib.get_close_matches(key, Config.model_fields, n=1)
        known = f"nearest: [{near[0]}]" if near else f"There are {', '.join(Config.model_fields)}."
        return f"{where}: unknown section [{key}]\n    {known}"
    option = nearest(key)
    why = "" if "." in key else " (a key has a dot: section.key)"
    return f"{where}: unknown key {key}{why}" + (f"\n    nearest: {option}" if option else "")


def _refused(where: str, option: Option, value: str) -> str:
    return f"{where}: {option.key} must be {option.type} (default {option.default}), not {value}\n    {option.doc}"


def _said(value: Any) -> str:
    if isinstance(value, bool | int | float | str):
        return toml_value(value)
    return "a table" if isinstance(value, dict) else "a list" if isinstance(value, list) else str(value)
