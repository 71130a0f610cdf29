"""What README.md shows is true: its commands run, its folders exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from titan_cli.cli import main
from titan_cli.plan import explain

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    if line.startswith("titan ")
]


def test_the_first_screen_is_forty_lines() -> None:
    assert README.index("## Use") <= len("\n".join(README.splitlines()[:41]))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_works(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings as --dry-run (tests/test_train_cli.py trains); everything else as written."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    assert main([*words, "--dry-run"] if words[0] == "train" and "--dry-run" not in words else words) == 0


def test_the_explanation_is_what_titan_prints() -> None:
    block = re.search(r"```\n(  tok_embeddings .*?)```", README, flags=re.DOTALL)
    assert block
    printed = [line.text for line in explain.explain(explain.target("llama3-8b-2d", None, [], None, "2.13.0", ""))]
    assert [line for line in block.group(1).splitlines() if line not in printed] == []


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:titan_cli|presets|models|tokenizer|benchmarks|tests|docs)/[\w/.]*)`", README)))
)
def test_a_path_of_the_readme_exists(path: str) -> None:
    assert (ROOT / path).exists()
