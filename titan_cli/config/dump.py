"""A configuration as text: TOML that loads back to an equal one, and where each value came from as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from titan_cli.config.schema import Config

if TYPE_CHECKING:
    from titan_cli.config.layers import Origin

Value = bool | int | float | str


def to_toml(config: Config, comments: Mapping[str, str] | None = None) -> str:
    """Every value, defaults included, section by section; `comments` (by key) go behind the values.

    TOML has no null: unset keys are left out.
    """
    blocks = []
    for section, values in config.model_dump().items():
        lines = [f"[{section}]"]
        for name, value in values.items():
            if value is not None:
                line = f"{name} = {toml_value(value)}"
                comment = (comments or {}).get(f"{section}.{name}")
                lines.append(f"{line:<36}  # {comment}" if comment else line)
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def toml_value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped and JSON pairs what is beyond U+FFFF.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)  # of a float: the shortest text that reads back as the same float


def shown(value: Value | None) -> str:
    """A value for people: as TOML, and a word for what TOML has none for."""
    return "unset" if value is None else toml_value(value)


def values(config: Config) -> dict[str, Value | None]:
    """The configuration flat, by key."""
    return {f"{section}.{name}": v for section, fields in config.model_dump().items() for name, v in fields.items()}


def origins_json(origins: Mapping[str, Origin]) -> dict[str, dict[str, str | int | None]]:
    """What config.origin.json holds: layer, file and line by key."""
    return {key: {"layer": o.layer, "file": o.file, "line": o.line} for key, o in origins.items()}
