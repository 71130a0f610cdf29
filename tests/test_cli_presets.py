"""The commands as a person meets them: stdout, stderr, exit code. In process, except where a pipe is the point."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from titan_cli import __version__, cli
from titan_cli.config.layers import load
from titan_cli.config.schema import Config

Capture = pytest.CaptureFixture[str]


def titan(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns without styles. Called by the test, because pytest changes stdout between fixtures and tests."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def test_ls_for_a_pipe_is_one_line_a_preset(capsys: Capture) -> None:
    code, out, err = titan(capsys, "presets", "ls")
    assert (code, err) == (0, "")
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in out.splitlines()}
    assert rows["llama3-8b-2d"] == ["8x H100-80, one machine", "dp_shard 4 x tp 2"]
    assert {"debug", "llama3-debug", "llama3-debug-2d", "llama3-1b", "llama3-8b-1d"} < set(rows)


def test_ls_json(capsys: Capture) -> None:
    code, out, _ = titan(capsys, "presets", "ls", "--json")
    assert code == 0
    assert {"name": "llama3-debug", "hardware": "CPU, 1 process", "layout": "1 rank"} in json.loads(out)["presets"]


def test_show_can_be_loaded_again(capsys: Capture, tmp_path: Path) -> None:
    code, out, err = titan(capsys, "presets", "show", "llama3-debug-2d", "--training.steps", "7", "lr-schedule.warmup-steps=1")
    assert (code, err) == (0, "")
    expected = load("llama3-debug-2d", overrides=["training.steps=7", "lr_schedule.warmup_steps=1"]).config
    assert Config.model_validate(tomli.loads(out)) == expected


def test_show_origin_names_layer_and_line(capsys: Capture, here: Path) -> None:
    (here / "c.toml").write_text("[training]\nseed = 5\n")
    _, out, _ = titan(capsys, "presets", "show", "llama3-debug-2d", "--origin", "--config", "c.toml", "training.steps=7")
    origins = {line.split(" = ")[0]: line.split("  # ")[1] for line in out.splitlines() if " = " in line}
    assert origins["steps"] == "command line"
    assert origins["seed"] == "config c.toml:2"
    assert origins["tp"].startswith("preset presets/llama3-debug-2d.toml:")
    assert origins["seq_len"].startswith("extends presets/llama3-debug.toml:")
    assert origins["max_norm"] == "default"
    assert tomli.loads(out)["training"]["seed"] == 5


def test_show_json_has_values_and_origins(capsys: Capture) -> None:
    _, out, _ = titan(capsys, "presets", "show", "debug", "--json", "training.steps=7")
    shown = json.loads(out)
    assert shown["config"]["training"]["steps"] == 7
    assert shown["origins"]["training.steps"] == {"layer": "command line", "file": None, "line": None}


def test_cp_copies_the_text_and_never_overwrites(capsys: Capture, here: Path) -> None:
    assert titan(capsys, "presets", "cp", "debug") == (0, "debug.toml\n", "")
    assert load("debug.toml").config == load("debug").config
    assert (here / "debug.toml").read_text().startswith("# Any machine")
    code, out, err = titan(capsys, "presets", "cp", "debug")
    assert (code, out) == (2, "")
    assert err == "error: debug.toml exists and is not overwritten\nName another file, or remove this one.\n"


def test_cp_to_a_file_a_folder_and_as_json(capsys: Capture, here: Path) -> None:
    (here / "mine").mkdir()
    assert titan(capsys, "presets", "cp", "debug", "mine")[1] == "mine/debug.toml\n"
    assert titan(capsys, "presets", "cp", "debug", "x.toml")[1] == "x.toml\n"
    _, out, _ = titan(capsys, "presets", "cp", "debug", "y.toml", "--json")
    assert json.loads(out) == {"preset": "debug", "path": "y.toml"}


@pytest.mark.parametrize(
    ("dest", "said"),
    [
        ("none/x.toml", "cannot be written: No such file or directory\nName a file in a folder that exists."),
        ("x", "x: a preset's file name ends in .toml\nCopy to x.toml, or create that folder first."),
    ],
)
def test_cp_says_why_it_cannot(capsys: Capture, here: Path, dest: str, said: str) -> None:
    code, out, err = titan(capsys, "presets", "cp", "debug", dest)
    assert (code, out) == (2, "")
    assert said in err
    assert list(here.iterdir()) == []


def test_diff_lists_what_differs(capsys: Capture) -> None:
    code, out, err = titan(capsys, "presets", "diff", "llama3-debug", "llama3-debug-2d")
    assert (code, out, err) == (0, "parallelism.dp_shard\t-1\t2\nparallelism.tp\t1\t2\n", "")
    _, out, _ = titan(capsys, "presets", "diff", "llama3-debug", "llama3-debug-2d", "--json")
    assert json.loads(out)["differences"][1] == {"key": "parallelism.tp", "a": 1, "b": 2}


def test_diff_of_equals_is_empty(capsys: Capture) -> None:
    assert titan(capsys, "presets", "diff", "debug", "debug") == (0, "", "no difference\n")


def test_diff_says_unset(capsys: Capture) -> None:
    assert "training.global_batch_size\tunset\t4\n" in titan(capsys, "presets", "diff", "debug", "llama3-debug")[1]


def test_options_for_a_pipe_and_as_schema(capsys: Capture) -> None:
    code, out, err = titan(capsys, "options", "training.st")
    assert (code, err) == (0, "")
    assert out == "training.steps\tinteger >= 1\t1000\toptimizer steps, counted from the beginning of the run\n"
    _, out, _ = titan(capsys, "options", "--json")
    assert json.loads(out) == Config.model_json_schema()


@pytest.mark.parametrize("argv", [["options"], ["presets", "ls"], ["presets", "diff", "debug", "llama3-8b-2d"]])
def test_tables_fit_80_columns(capsys: Capture, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    use_terminal(monkeypatch)
    code, out, _ = titan(capsys, *argv)
    assert code == 0
    assert "\t" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_options_on_a_terminal_stand_under_their_section(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    _, out, _ = titan(capsys, "options", "optimizer.lr")
    assert [line.split() for line in out.splitlines()[1:3]] == [
        ["[optimizer]"],
        ["lr", "number", ">", "0", "peak", "learning", "rate"],
    ]


@pytest.mark.parametrize(
    "argv", [["--help"], ["-h"], ["presets", "--help"], ["presets", "show", "--help"], ["options", "--help"]]
)
def test_help_fits_80_columns(capsys: Capture, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = titan(capsys, *argv)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: titan")
    assert max(map(len, out.splitlines())) <= 80


def test_version(capsys: Capture) -> None:
    assert titan(capsys, "--version") == (0, f"titan {__version__}\n", "")


def test_nothing_to_do_prints_help_and_is_a_usage_error(capsys: Capture) -> None:
    code, out, _ = titan(capsys)
    assert code == 2
    assert out.startswith("Usage: titan")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["presest", "ls"], "No such command 'presest'. Did you mean 'presets'?\nSee `titan --help`."),
        (["presets"], "Missing command.\nSee `titan presets --help`."),
        (["presets", "show"], "Missing argument 'NAME'.\nSee `titan presets show --help`."),
        (["presets", "ls", "--jsn"], "No such option: --jsn (Possible options: --json)"),
        (["presets", "show", "debug", "--steps", "3"], "training.steps is an option of the run: write training.steps=VALUE."),
        (["presets", "show", "debug", "--training.steps", "--json"], "training.steps needs a value, but --json follows"),
        (["presets", "show", "debug", "--training.steps"], "error: training.steps needs a value\n"),
        (["presets", "show", "debgu"], "unknown preset debgu\n    Did you mean debug?"),
        (["presets", "cp", "debgu"], "unknown preset debgu"),
        (["presets", "diff", "debug", "x.toml"], "x.toml: no such file"),
        (["presets", "show", "debug", "training.stpes=1"], "nearest: training.steps (integer >= 1; default 1000)"),
        (["presets", "ls", "--", "--nproc=2"], "titan presets takes nothing after --"),
        (["options", "stpes"], "no option matches stpes\nnearest: training.steps"),
        (["options", "zzzzzz"], "no option matches zzzzzz\n`titan options` lists all."),
        (["options", "lr", "--json"], "takes no PATTERN\nLeave one of the two out."),
    ],
)
def test_usage_errors_exit_2_and_say_what_to_do(capsys: Capture, here: Path, argv: list[str], said: str) -> None:
    code, out, err = titan(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err


def test_an_error_of_our_own_exits_1_and_asks_for_a_report(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise RuntimeError("a bug")

    monkeypatch.setattr("titan_cli.config.presets.names", broken)
    code, out, err = titan(capsys, "presets", "ls")
    assert (code, out) == (1, "")
    assert "RuntimeError: a bug" in err
    assert "Please report it" in err
    assert len(err.splitlines()) < 12


def test_ctrl_c_exits_130(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("titan_cli.config.presets.names", interrupted)
    assert titan(capsys, "presets", "ls")[0] == 130


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m titan_cli.cli options --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
