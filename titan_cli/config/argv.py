"""The command line before typer sees it: torchrun's part is split off, `--section.key value` becomes `section.key=value`.

Pure, and without any option's name: a dot is what tells a configuration key from an option of a command.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from titan_cli.errors import TitanError

_OVERRIDE = re.compile(r"(?P<key>[A-Za-z][\w-]*(\.[\w-]+)+)=(?P<value>.*)", re.DOTALL)
_NEGATIVE = re.compile(r"-(\.?\d.*|inf|nan)")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our words and torchrun's: everything after the first lone `--`. Before parsing, because typer drops the `--`."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def normalise(argv: Sequence[str]) -> list[str]:
    """`--a.b-c 1` and `--a.b-c=1` as the positional `a.b_c=1`; every other word as it is.

    Raises TitanError for a key without a value.
    """
    out: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name.startswith("--") and "." in name:
            if not equals:
                if not words or not _is_value(words[0]):
                    raise _needs_value(_key(name[2:]), words[0] if words else None)
                value = words.pop(0)
            word = f"{_key(name[2:])}={value}"
        elif override := _OVERRIDE.fullmatch(word):
            word = f"{_key(override['key'])}={override['value']}"
        out.append(word)
    return out


def _key(name: str) -> str:
    return name.replace("-", "_")


def _is_value(word: str) -> bool:
    # `-` alone is a file name by custom; a word like `a.b=1` after a key is the next override, not the key's value.
    if _OVERRIDE.fullmatch(word):
        return False
    return not word.startswith("-") or word == "-" or _NEGATIVE.fullmatch(word) is not None


def _needs_value(key: str, following: str | None) -> TitanError:
    found = f", but {following} follows" if following is not None else ""
    return TitanError(
        f"{key} needs a value{found}",
        hint=f"Write {key}=VALUE (also for a value that begins with a dash). `titan options {key}` says what it takes.",
    )
