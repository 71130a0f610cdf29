"""A user's own modules: found in the current folder or on Python's path, looked at as text, or imported. No torch."""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Import as `python -m` does, which is how workers are started; the path of the command `titan` lacks the folder."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def find(name: str) -> ModuleSpec | None:
    """Where the module of that import path lies, None if there is none. Imports the packages above it, not itself."""
    with current_folder_first():
        try:
            return find_spec(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                return None  # a package above it is missing, or is a module
            raise  # one of them imports something that is missing


def load(name: str) -> ModuleType:
    """The module of that import path. Raises what it raises."""
    with current_folder_first():
        return import_module(name)


def may_define(spec: ModuleSpec, name: str) -> bool:
    """Whether the module's text binds `name` anywhere, so that a module which needs torch can be checked without it.

    True where the text cannot tell: no source, `import *`, a `__getattr__`. Raises SyntaxError.
    """
    if spec.origin is None or not spec.origin.endswith(".py"):
        return True
    bound: set[str] = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_bytes(), spec.origin)):
        match node:
            case ast.FunctionDef(name=found) | ast.ClassDef(name=found) | ast.Name(id=found, ctx=ast.Store()):
                bound.add(found)
            case ast.alias():
                bound.add(node.asname or node.name)
    return not bound.isdisjoint({name, "*", "__getattr__"})


def place(error: Exception) -> str:
    """The line that an import failed at, file:line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}"
