"""In which line of a TOML text a key stands. tomli gives values without positions; errors and origins need them.

Expects text that tomli has accepted. Values are skipped, not read, so this is a scanner of brackets and strings.
"""

from __future__ import annotations

import re

import tomli

_TOKEN = re.compile(
    r'''
      """(?:\\.|[^\\])*?"{3,5}   # a multi-line string may end with two quotes of its own
    | \'{3}.*?\'{3,5}
    | "(?:\\.|[^"\\\n])*"
    | '[^'\n]*'
    | \#[^\n]*
    | [\w+-]+
    | [=\[\]{},\n]
    ''',
    re.VERBOSE | re.DOTALL,
)

Key = tuple[str, ...]


def key_lines(text: str) -> dict[Key, int]:
    """Line (from 1) of the first mention of every key and table, by its full path: ("training", "steps")."""
    text = text.replace("\r\n", "\n")
    lines: dict[Key, int] = {}
    table: Key = ()
    path: Key = ()
    parts: list[str] = []  # the key being read
    stack: list[tuple[str, Key]] = []  # open brackets of the value, and the key each belongs to
    mode = "key"  # or "header", "value"
    line, at = 1, 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        line, at = line + text.count("\n", at, match.start()), match.start()
        if token.startswith("#"):
            continue
        if mode == "value":
            if token in ("[", "{"):
                stack.append((token, stack[-1][1] if stack and stack[-1][0] == "[" else path))
                mode = "value" if token == "[" else "key"
            elif token in ("]", "}"):
                stack.pop()
            elif (token == "\n" and not stack) or (token == "," and stack[-1][0] == "{"):
                mode = "key"
        elif token == "=":
            path = (stack[-1][1] if stack else table) + tuple(parts)
            _note(lines, path, line)
            mode, parts = "value", []
        elif token == "}":  # an empty inline table, or a comma before its end
            stack.pop()
            mode = "value"
        elif token == "[":
            mode = "header"
        elif token == "\n" and mode == "header":
            table, parts, mode = tuple(parts), [], "key"
        elif token not in ("]", "\n", ","):
            parts.append(_plain(token))
            if mode == "header":
                _note(lines, tuple(parts), line)
    return lines


def _note(lines: dict[Key, int], path: Key, line: int) -> None:
    for depth in range(1, len(path) + 1):
        lines.setdefault(path[:depth], line)


def _plain(token: str) -> str:
    if token[0] not in "\"'":
        return token
    return str(tomli.loads(f"key = {token}")["key"])
