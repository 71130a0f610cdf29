"""Patterns over module names, as plans and TP_PLANs write them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name fits a pattern in which `*` is one part: layers.*.norm fits layers.3.norm only."""
    return name.count(".") == pattern.count(".") and fnmatch.fnmatchcase(name, pattern)


def lookup(name: str, table: Mapping[str, str]) -> str | None:
    """The value of the first pattern that `name` fits; None if none does."""
    return next((value for pattern, value in table.items() if matches(name, pattern)), None)
