"""The schema as rows: every option's key, type in words, default and documentation, for errors and `titan options`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from titan_cli.config.dump import shown, toml_value
from titan_cli.config.schema import Config


@dataclass(frozen=True)
class Option:
    """One field of the configuration."""

    key: str  # section.name
    type: str  # "integer >= 1"
    default: str  # as TOML; "unset" where the schema says None
    doc: str
    is_text: bool  # the command line's characters are the value, without quotes
    words: tuple[str, ...]  # fixed words that it takes, as "auto"

    def __str__(self) -> str:
        return f"{self.key} ({self.type}; default {self.default}): {self.doc}"


@cache
def options() -> dict[str, Option]:
    """All options by key, in the schema's order."""
    schema = Config.model_json_schema()
    found = {}
    for section, reference in schema["properties"].items():
        for name, field in schema["$defs"][reference["$ref"].rpartition("/")[2]]["properties"].items():
            option = _option(f"{section}.{name}", field)
            found[option.key] = option
    return found


def matching(pattern: str) -> list[Option]:
    """Options whose key or documentation contains the pattern; case does not matter, `-` and `_` are the same."""
    wanted = pattern.lower().replace("-", "_")
    return [o for o in options().values() if wanted in f"{o.key} {o.doc}".lower().replace("-", "_")]


def nearest(key: str) -> Option | None:
    """The option that was probably meant. The same name in another section is nearer than a similar spelling."""
    name = key.rpartition(".")[2]
    same_name = [k for k in options() if k.rpartition(".")[2] == name]
    by_name = {k.rpartition(".")[2]: k for k in options()}
    near_names = [by_name[n] for n in difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)]
    near_keys = difflib.get_close_matches(key, same_name or options(), n=1, cutoff=0.0 if same_name else 0.6)
    return next((options()[k] for k in near_keys + near_names), None)


def _option(key: str, field: dict[str, Any]) -> Option:
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    return Option(
        key=key,
        type=_either([word for kind in kinds for word in _words(kind)]),
        default=shown(field["default"]),
        doc=field["description"],
        is_text=all(kind["type"] == "string" for kind in kinds),
        words=tuple(word for kind in kinds for word in _fixed(kind) if isinstance(word, str)),
    )


def _fixed(kind: dict[str, Any]) -> list[Any]:
    return list(kind.get("enum", [kind["const"]] if "const" in kind else []))


def _words(kind: dict[str, Any]) -> list[str]:
    if fixed := _fixed(kind):
        return [toml_value(value) for value in fixed]
    if kind["type"] == "array":
        return [f"list of {_words(kind['items'])[0]}"]
    names = {"string": kind.get("format", "text"), "boolean": "true or false"}
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {kind[bound]:g}" for bound, sign in signs.items() if bound in kind]
    return [" ".join([names.get(kind["type"], kind["type"]), " and ".join(bounds)]).strip()]


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
