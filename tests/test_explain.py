"""`titan explain-compile`: golden plans of every preset on every torch, pages, and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from titan_cli import hardware
from titan_cli.cli import main
from titan_cli.config import dump, layers, presets
from titan_cli.plan import explain
from titan_cli.plan.cells import CELLS

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "plans"
TORCH = ("2.11.0", "2.13.0", "2.14.1")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are the same on every machine: no GPU, and a compiler."""
    monkeypatch.setattr(hardware, "visible_gpus", lambda: ())
    monkeypatch.setattr(hardware, "has_cxx_compiler", lambda: True)


def check_golden(path: Path, text: str) -> None:
    """Equal to the file; TITAN_UPDATE_GOLDEN=1 rewrites it."""
    if os.environ.get("TITAN_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, f"TITAN_UPDATE_GOLDEN=1 rewrites {path.name}, if the new text is what you mean"


@pytest.mark.parametrize("torch", TORCH)
@pytest.mark.parametrize("preset", presets.names())
def test_a_presets_plan_is_golden(preset: str, torch: str) -> None:
    target = explain.target(preset, None, [], None, torch, "")
    lines = [line.text for line in explain.explain(target)]
    assert max(map(len, lines)) <= 80
    check_golden(GOLDEN / f"{preset}-{torch}.txt", "\n".join(lines) + "\n")
    check_golden(GOLDEN / f"{preset}-{torch}.json", json.dumps(target.plan.to_json(), indent=1) + "\n")


def test_the_rules_document_is_generated() -> None:
    check_golden(ROOT / "docs" / "compile-rules.md", explain.markdown())


@pytest.mark.parametrize("name", CELLS)
def test_a_page_fits_eighty_columns_and_names_case_and_evidence(name: str) -> None:
    text = [line.text for line in explain.page(name)]
    assert max(map(len, text)) <= 80 or any(len(line) > 80 and "titan explain-compile" in line for line in text)
    assert "smallest case" in text
    assert "evidence" in text


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["explain-compile", *arguments])
    return code, *capsys.readouterr()


def test_a_forbidden_strategy_is_refused_with_rule_and_next_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["--preset", "llama3-8b-2d", "compile.strategy=whole"], capsys)
    assert (code, out) == (3, "")
    assert "whole-tp-embedding" in err
    assert "compile.strategy=block" in err
    code, out, err = run(["--preset", "llama3-8b-2d", "compile.strategy=whole", "--json"], capsys)
    assert code == 3
    assert json.loads(out)["refused"]["rule"] == "whole-tp-embedding"


def test_without_a_rule_the_plan_shows_what_it_was_for(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(["--preset", "llama3-8b-2d", "--json"], capsys)
    assert json.loads(out)["cures"] == [{"rule": "tp-embedding-wait", "what": "wait on tok_embeddings output"}]
    _, out, _ = run(["--preset", "llama3-8b-2d", "--without", "tp-embedding-wait", "--json"], capsys)
    assert json.loads(out)["cures"] == []


def test_another_device_and_another_torch(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["--preset", "llama3-8b-2d", "--gpu", "A100-80", "--torch", "2.14.1"], capsys)
    assert code == 0
    assert "A100-80" in out.splitlines()[0]
    assert "FSDP(compile(AC(TransformerBlock)))" in out
    code, out, _ = run(["--preset", "llama3-8b-2d", "--torch", "2.15.1"], capsys)
    assert code == 0
    assert "not checked on this version" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--preset", "llama3-debug", "--torch", "2.10.0"], "titan supports torch >= 2.11"),
        (["--preset", "llama3-debug", "--torch", "new"], "2.14.1"),
        (["--preset", "llama3-debug", "--gpu", "H100-81"], "H100-80"),
        (["--preset", "llama3-debug", "--without", "ac-lru"], "ac-lru-cache"),
        (["--rule", "tp-embeding-wait"], "tp-embedding-wait"),
        (["--run", "nothing"], "launch.runs_dir"),
    ],
)
def test_a_wrong_question_is_a_usage_error(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(arguments, capsys)
    assert (code, out) == (2, "")
    assert says in err


def test_an_existing_run_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.toml").write_text(dump.to_toml(layers.load("llama3-debug-2d").config))
    code, out, _ = run(["--run", "mine", f"launch.runs_dir={tmp_path}", "--torch", "2.13.0"], capsys)
    assert code == 0
    assert out.splitlines()[0] == "mine on 4 x CPU: dp_shard 2 x tp 2, torch 2.13.0"
    assert "tp-embedding-wait" in out


def test_without_a_preset_one_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([], capsys)
    assert code == 0
    rows = dict(line.split("\t", 1) for line in out.splitlines())
    assert list(rows) == presets.names()
    assert "tp-embedding-wait" in rows["llama3-8b-2d"]


def test_a_rules_page_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["--rule", "tp-embedding-wait"], capsys)
    assert code == 0
    assert "pytorch/pytorch#191113" in out
    code, out, _ = run(["--rules"], capsys)
    assert [line.split("\t")[0] for line in out.splitlines()] == list(CELLS)
