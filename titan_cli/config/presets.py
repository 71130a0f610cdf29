"""Where presets live, what they are called, and which hardware each is for. Files only; layers.py reads what is in them."""

from __future__ import annotations

import difflib
from pathlib import Path

from titan_cli.errors import TitanError

FOLDER = Path(__file__).parent.parent / "presets"


def names() -> list[str]:
    """The shipped presets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find(name: str, beside: Path = Path()) -> Path:
    """A shipped preset's file, or a path that ends in .toml (relative to `beside`). Raises TitanError if there is none."""
    if name in names():
        return FOLDER / f"{name}.toml"
    if not name.endswith(".toml"):
        raise TitanError(f"unknown preset {name}", hint=_nearest(name))
    path = beside / Path(name).expanduser()
    if not path.is_file():
        raise TitanError(f"{path}: no such file", hint=_nearest(path.stem))
    return path


def hardware(path: Path) -> str:
    """The preset's first line: a comment that says which hardware it is for. Empty if there is none."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""


def shown(path: Path) -> str:
    """The path as people are told it: presets/NAME.toml for a shipped one, wherever titan is installed."""
    return f"presets/{path.name}" if path.resolve().parent == FOLDER.resolve() else str(path)


def copy(name: str, dest: Path) -> Path:
    """Write the preset's text to `dest`, a file or an existing folder. Raises TitanError rather than overwrite."""
    source = find(name)
    dest = dest.expanduser()
    target = dest / source.name if dest.is_dir() else dest
    if target.suffix != ".toml":
        raise TitanError(
            f"{target}: a preset's file name ends in .toml", hint=f"Copy to {target}.toml, or create that folder first."
        )
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise TitanError(f"{target} exists and is not overwritten", hint="Name another file, or remove this one.") from None
    except OSError as error:
        raise TitanError(
            f"{target}: cannot be written: {error.strerror}", hint="Name a file in a folder that exists."
        ) from None
    return target


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.5)
    known = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(names())}."
    return f"{known} A file of your own is named by a path that ends in .toml."
