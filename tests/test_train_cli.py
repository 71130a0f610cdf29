"""`titan train` as a person meets it: what it writes, how it refuses, and how each failure ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.cells import corpus
from titan_cli.cli import main
from titan_cli.errors import ExitCode
from titan_cli.runs import records
from titan_cli.runs.folder import RunFolder, committed_steps


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture
def runs(tmp_path: Path, text: Path) -> Iterator[Path]:
    """An empty folder for runs; afterwards no worker of them is left."""
    yield tmp_path / "runs"
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
    assert not left, f"processes outlived the launcher: {left}"


def line(runs: Path, text: Path, *words: str) -> list[str]:
    return ["train", "--preset", "llama3-debug", "--run", "r", f"launch.runs_dir={runs}", f"data.path={text}", *words]


def start(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "titan_cli.cli", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate()
    return process.returncode, stderr


def titan(arguments: list[str], **environment: str) -> tuple[int, str]:
    return finish(start(arguments, **environment))


def wait_for_step(run: RunFolder, step: int, process: subprocess.Popen[str]) -> None:
    while not any(record["step"] >= step for record in records.read(run.metrics)):
        assert process.poll() is None, f"ended before step {step}: {finish(process)}"
        time.sleep(0.05)


# What is found before anything is started: in this process, in milliseconds.


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert not out
    return code, err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--preset", "lama3-debug"], 2, "llama3-debug"),
        ([], 2, "titan train --preset debug"),
        (["llama3-1b"], 2, "titan train --preset llama3-1b"),
        (["--preset", "llama3-debug", "training.step=3"], 2, "training.steps"),
        (["--preset", "llama3-debug", "training.steps=many"], 2, "training.steps must be"),
        (["--preset", "llama3-debug", "parallelism.dp_shard=3", "launch.gpus_per_node=2"], 2, "dp_shard"),
        (["--preset", "llama3-debug", "parallelism.tp=3"], 2, "tp can be 1, 2"),
        (["--preset", "llama3-debug", "launch.gpu=H100-81"], 2, "H100-80"),
        (["--preset", "llama3-debug", "--run", "a/b"], 2, "letters, digits"),
        (["--preset", "llama3-debug", "tokenizer.path=/nowhere/t.model"], 3, "No such file"),
        (["--preset", "llama3-debug", "tokenizer.name=gpt2"], 2, "llama3"),
        (["--preset", "llama3-debug", "data.path=/nowhere"], 3, "data.path=/nowhere: no such file"),
        (["--preset", "llama3-debug", "optimizer.lr=inf"], 2, "optimizer.lr must be"),
        (["--preset", "llama3-debug", "--", "training.steps=3"], 2, "stand before --"),
        (["--preset", "llama3-debug", "model.vocab_size=512"], 3, "model.vocab_size=4096"),
        (["--preset", "llama3-debug", "parallelism.pp=4"], 2, "pp can be 1 to 2 with 1F1B"),
        (["--preset", "dsv3-debug-ep"], 3, "can be planned, not trained yet"),
        (["--preset", "llama3-debug", "compile.strategy=whole"], 3, "compile.strategy=block"),
        (["--preset", "llama3-debug", "launch.nodes=2", "parallelism.dp_shard=2"], 3, "one machine"),
        (["--preset", "llama3-debug", "--fork", "nothing"], 3, "nothing"),
        (["--preset", "llama3-debug", "--", "--nproc-per-node=2"], 2, "launch.gpus_per_node"),
        (["--preset", "llama3-debug", "--", "--nproc_per_node", "2"], 2, "launch.gpus_per_node"),
    ],
)
def test_a_refusal_has_its_code_and_says_what_to_do(
    words: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = words.index("--") if "--" in words else len(words)
    got, err = refused(["train", *words[:split], f"launch.runs_dir={tmp_path}", *words[split:]], capsys)
    assert (got, says in err) == (code, True), err
    assert not list(tmp_path.iterdir()), "a refused run leaves no folder"


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_an_environment_that_turns_compile_off_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    code, err = refused(["train", "--preset", "llama3-debug", f"launch.runs_dir={tmp_path}"], capsys)
    assert code == ExitCode.REFUSED
    assert "compile.strategy=off" in err


def test_inductor_without_a_compiler_is_refused_and_auto_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    words = ["train", "--preset", "llama3-debug", f"launch.runs_dir={tmp_path}"]
    code, err = refused([*words, "compile.backend=inductor"], capsys)
    assert code == ExitCode.REFUSED
    assert "compile.backend=aot_eager" in err
    assert main([*words, "compile.backend=auto", "--dry-run"]) == ExitCode.DONE
    assert '"backend": "aot_eager"' in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    code, err = refused(["train", "--preset", "llama3-debug", "--run", "mine", f"launch.runs_dir={tmp_path}"], capsys)
    assert code == ExitCode.USAGE
    assert "is not a run" in err


def test_an_8b_preset_without_anything_says_the_two_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, err = refused(["train", "--preset", "llama3-8b-2d", f"launch.runs_dir={tmp_path}"], capsys)
    assert code == ExitCode.REFUSED
    assert "needs 8 H100-80 GPUs" in err
    assert "HF_HUB_OFFLINE is set" in err
    begin = f"titan train --preset llama3-8b-2d launch.runs_dir={tmp_path}"
    assert "hf download meta-llama/Llama-3.1-8B original/tokenizer.model" in err
    assert f"either  {begin} tokenizer.path=llama3/original/tokenizer.model data.path=FOLDER" in err
    assert f"or      {begin} data.source=python-stdlib tokenizer.name=titan" in err


def test_states_that_cannot_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.flavor=70b", "data.source=python-stdlib", "tokenizer.name=titan", f"launch.runs_dir={tmp_path}"]
    code, err = refused(["train", "--preset", "llama3-8b-2d", *words], capsys)
    assert code == ExitCode.REFUSED
    # 70,553,706,496 parameters x 16 bytes / 8 ranks
    assert "131.42 GiB on each device" in err
    assert "the device has 79.2 GiB" in err


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    code, err = refused(["train", "--preset", "llama3-debug", f"launch.runs_dir={tmp_path / 'file' / 'runs'}"], capsys)
    assert code == ExitCode.REFUSED
    assert "launch.runs_dir" in err


def test_a_port_in_use_is_a_rendezvous_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = [f"launch.runs_dir={tmp_path}", "--", f"--rdzv-endpoint=127.0.0.1:{port}"]
        code, err = refused(["train", "--preset", "llama3-debug", *words], capsys)
    assert code == ExitCode.RENDEZVOUS
    assert f"port {port}" in err


def test_dry_run_prints_everything_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "llama3-8b-2d", "--dry-run", f"launch.runs_dir={tmp_path}"]
    assert main(["train", *words]) == ExitCode.DONE
    out = capsys.readouterr().out
    for said in (
        "dp_shard = 4",
        '"strategy": "block"',
        '"rejected"',
        "--nproc-per-node=8",
        "would be refused here",
    ):
        assert said in out
    assert not list(tmp_path.iterdir())


# What happens once workers run.


def test_a_run_leaves_the_folder_that_the_contract_names(runs: Path, text: Path) -> None:
    run = RunFolder(runs / "r")
    code, err = titan(line(runs, text, "metrics.eval_every=10", "checkpoint.interval=8", "checkpoint.keep=2"))
    assert code == ExitCode.DONE, err
    for path in (run.config, run.origin, run.plan, run.command, run.env, run.status, run.events, run.metrics):
        assert path.is_file(), path
    assert (runs / "latest").resolve() == run.path.resolve()
    assert committed_steps(run) == [16, 20]
    status = records.read_json(run.status)
    assert (status["state"], status["step"], status["exit"], status["saved_step"]) == ("done", 20, 0, 20)
    metrics = records.read(run.metrics)
    assert [m["step"] for m in metrics] == list(range(1, 21))
    assert [m["step"] for m in metrics if "val_loss" in m] == [1, 10, 20]
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1
    assert [m["tok_per_s"] is None for m in metrics[:4]] == [True, True, False, False], "steps 1 and 2 are not timed"
    assert metrics[4]["tokens"] == 5 * 4 * 64
    assert metrics[4]["tok_per_s"] == pytest.approx(4 * 64 / metrics[4]["step_s"])
    assert all(m["mfu"] is None for m in metrics), "a CPU has no known peak"
    assert set(metrics[0]) >= {
        "schema",
        "time",
        "attempt",
        "grad_norm",
        "lr",
        "memory_peak_gib",
        "memory_reserved_gib",
        "ranks",
    }
    phases = [e["phase"] for e in records.read(run.attempt(1).rank_events(0)) if e["kind"] == "phase"]
    assert list(dict.fromkeys(phases)) == ["starting", "building", "compiling", "running", "saving"]
    assert "step=20 loss=" in err
    # The same line again has nothing to do; more steps continue; another learning rate is another run.
    assert titan(line(runs, text, "metrics.eval_every=10", "checkpoint.interval=8", "checkpoint.keep=2"))[0] == ExitCode.DONE
    assert [a.number for a in run.attempts()] == [1]
    code, err = titan(["train", "--run", "r", f"launch.runs_dir={runs}", "training.steps=22"])
    assert code == ExitCode.DONE, err
    assert [(m["step"], m["attempt"]) for m in records.read(run.metrics)][-2:] == [(21, 2), (22, 2)]
    code, err = titan(line(runs, text, "checkpoint.interval=8", "optimizer.lr=0.5"))
    assert code == ExitCode.USAGE
    assert "optimizer.lr: 0.001 in the run, 0.5 now" in err
    code, err = titan(["train", "--run", "r", f"launch.runs_dir={runs}", "training.steps=24", "training.seed=9"])
    assert code == ExitCode.USAGE
    assert "training.seed: 0 in the run, 9 now" in err
    words = [
        *line(runs, text, "optimizer.lr=0.5", "optimizer.beta2=0.5", "training.steps=23"),
        "--run",
        "child",
        "--fork",
        "r@22",
    ]
    code, err = titan(words)
    assert code == ExitCode.DONE, err
    child = RunFolder(runs / "child")
    assert [m["step"] for m in records.read(child.metrics)] == [23]
    # The checkpoint's optimizer came along, but not the values that this run sets.
    import torch.distributed.checkpoint.format_utils as dcp

    dcp.dcp_to_torch_save(child.checkpoint(23), runs / "child.pt")
    saved = torch.load(runs / "child.pt", weights_only=False)["optimizer"]
    assert {tuple(value) for name, value in saved.items() if name.endswith(".betas")} == {(0.9, 0.5)}
    assert titan(words)[0] == ExitCode.DONE, "the same line, also when the parent's checkpoint is gone"
    assert titan([*words[:-1], "r@20"])[0] == ExitCode.USAGE


@pytest.mark.slow
def test_ten_thousand_lines_of_a_worker_stay_in_its_log(runs: Path, text: Path, tmp_path: Path) -> None:
    noise = tmp_path / "noise"
    noise.mkdir()
    (noise / "sitecustomize.py").write_text(
        "import atexit, os\nif 'RANK' in os.environ:\n    atexit.register(lambda: print('\\x1b[2J noise [bold] \\n' * 10000))\n"
    )
    code, err = titan(line(runs, text, "training.steps=2"), PYTHONPATH=str(noise))
    assert code == ExitCode.DONE, err
    assert "noise" not in err
    assert "\x1b" not in err
    assert RunFolder(runs / "r").attempt(1).rank_log(0).read_text().count("noise") == 10000


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_stops(number: signal.Signals, code: int, runs: Path, text: Path) -> None:
    run = RunFolder(runs / "r")
    process = start(line(runs, text, "training.steps=100000"))
    wait_for_step(run, 3, process)
    process.send_signal(number)
    got, err = finish(process)
    assert got == code, err
    last = records.read(run.metrics)[-1]["step"]
    assert committed_steps(run) == [last]
    status = records.read_json(run.status)
    assert (status["state"], status["saved_step"], status["exit"]) == ("stopped", last, code)
    assert f"step {last} is saved" in err
    assert "a second one stops at once" in err


@pytest.mark.slow
def test_a_signal_before_step_one_has_nothing_to_save(runs: Path, text: Path) -> None:
    process = start(line(runs, text))
    while not (runs / "r" / "status.json").is_file():
        assert process.poll() is None, finish(process)
        time.sleep(0.05)
    process.terminate()
    code, err = finish(process)
    assert code == ExitCode.STOPPED, err
    assert "nothing" in err
    assert not committed_steps(RunFolder(runs / "r"))


@pytest.mark.slow
def test_a_second_signal_stops_at_once(runs: Path, text: Path) -> None:
    run = RunFolder(runs / "r")
    # One step of 20,000 micro-batches takes minutes: the first signal waits for its end, the second does not.
    process = start(line(runs, text, "training.global_batch_size=20000", "training.steps=2"))
    while "running" not in run.attempt(1).rank_events(0).read_text() if run.attempt(1).rank_events(0).is_file() else True:
        assert process.poll() is None, finish(process)
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None, "the first signal lets the step finish"
    process.send_signal(signal.SIGTERM)
    code, err = finish(process)
    assert code == ExitCode.STOPPED_WITH_LOSS, err
    assert "second signal" in err


@pytest.mark.slow
def test_torchrun_told_to_stop_saves_and_stops(runs: Path, text: Path) -> None:
    """As a scheduler does that signals every process of a job."""
    run = RunFolder(runs / "r")
    process = start(line(runs, text, "training.steps=100000"))
    wait_for_step(run, 3, process)
    (torchrun,) = psutil.Process(process.pid).children()
    torchrun.terminate()
    code, err = finish(process)
    assert code == ExitCode.STOPPED, err
    assert committed_steps(run)


@pytest.mark.slow
def test_a_killed_launcher_leaves_a_run_that_continues(runs: Path, text: Path) -> None:
    run = RunFolder(runs / "r")
    words = line(runs, text, "parallelism.dp_shard=2")
    process = start([*words, "training.steps=100000"])
    wait_for_step(run, 3, process)
    process.kill()
    finish(process)
    # At once: it waits for the workers, which save and end.
    code, err = titan([*words, "training.steps=100000", "--dry-run"])
    assert code == ExitCode.DONE, err
    code, err = titan([*words, "training.steps=20"])
    assert code == ExitCode.DONE, err
    steps = [m["step"] for m in records.read(run.metrics)]
    assert steps == sorted(set(steps)), "no step was trained twice"


@pytest.mark.slow
def test_without_a_last_checkpoint_a_stop_is_a_loss(runs: Path, text: Path) -> None:
    process = start(line(runs, text, "training.steps=100000", "checkpoint.at_end=false"))
    wait_for_step(RunFolder(runs / "r"), 3, process)
    process.terminate()
    code, err = finish(process)
    assert code == ExitCode.STOPPED_WITH_LOSS, err
    assert "checkpoint.at_end=false" in err


@pytest.mark.slow
def test_a_rank_that_does_not_join_a_collective_is_named(runs: Path, text: Path) -> None:
    run = RunFolder(runs / "r")
    process = start(line(runs, text, "parallelism.dp_shard=2", "training.steps=100000", "launch.timeout_s=3"))
    wait_for_step(run, 3, process)
    pid = next(e["data"]["pid"] for e in records.read(run.attempt(1).rank_events(1)) if "pid" in e["data"])
    os.kill(pid, signal.SIGSTOP)
    code, err = finish(process)
    assert code == ExitCode.HANG, err
    assert "ranks [1] did not join" in err


@pytest.mark.slow
def test_a_torch_that_cannot_be_imported_is_said(runs: Path, text: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text("import os, sys\nif 'RANK' in os.environ:\n    sys.modules['torch'] = None\n")
    code, err = titan(line(runs, text), PYTHONPATH=str(broken))
    assert code == ExitCode.WORKER_EXCEPTION, err
    assert "ModuleNotFoundError" in err


@pytest.mark.slow
def test_a_closed_terminal_loses_nothing(runs: Path, text: Path) -> None:
    process = start(line(runs, text))
    assert process.stderr
    process.stderr.readline()
    process.send_signal(signal.SIGHUP)
    process.stderr.close()
    assert process.wait() == ExitCode.DONE
    assert committed_steps(RunFolder(runs / "r")) == [20]


def test_a_killed_worker_is_named_and_the_line_continues(runs: Path, text: Path) -> None:
    run = RunFolder(runs / "r")
    words = line(runs, text, "parallelism.dp_shard=2", "training.steps=100000", "checkpoint.interval=2")
    process = start(words)
    wait_for_step(run, 5, process)
    pid = next(e["data"]["pid"] for e in records.read(run.attempt(1).rank_events(1)) if "pid" in e["data"])
    os.kill(pid, signal.SIGKILL)
    code, err = finish(process)
    assert code == ExitCode.WORKER_KILLED, err
    assert "rank 1 was killed by SIGKILL" in err
    saved = committed_steps(run)[-1]
    assert saved >= 4
    code, err = titan([w for w in words if not w.startswith("training.steps")] + [f"training.steps={saved + 2}"])
    assert code == ExitCode.DONE, err
    assert f"from step {saved + 1} to {saved + 2}" in err


@pytest.mark.slow
def test_a_worker_exception_names_rank_phase_and_log(runs: Path, text: Path) -> None:
    run = RunFolder(runs / "r")
    assert titan(line(runs, text, "training.steps=2"))[0] == ExitCode.DONE
    (run.checkpoint(2) / ".metadata").write_bytes(b"not a checkpoint")
    code, err = titan(line(runs, text, "training.steps=3"))
    assert code == ExitCode.WORKER_EXCEPTION, err
    for said in ("rank: 0", "step: 0, building", "rank-0000.log", "step-00000002 cannot be loaded", "delete its folder"):
        assert said in err
    assert "Traceback" in run.attempt(2).rank_log(0).read_text()


@pytest.mark.slow
def test_out_of_memory_has_its_own_code(runs: Path, text: Path) -> None:
    huge = 10**9  # sequences: 512 GB of token ids
    code, err = titan(line(runs, text, f"training.local_batch_size={huge}", f"training.global_batch_size={huge}"))
    assert code == ExitCode.OUT_OF_MEMORY, err
    assert "compiling" in err


def test_a_loss_that_is_not_finite_stops_before_the_update(runs: Path, text: Path) -> None:
    run = RunFolder(runs / "r")
    code, err = titan(line(runs, text, "optimizer.lr=1e30", "checkpoint.interval=1"))
    assert code == ExitCode.NOT_FINITE, err
    assert "optimizer.lr too high" in err
    assert "step: 2, running" in err
    null = records.read(run.metrics)[-1]
    assert (null["step"], null["loss"]) == (2, None)
    assert records.read_json(run.status)["state"] == "failed"


@pytest.mark.slow
def test_not_reaching_step_one_in_time_is_a_hang(runs: Path, text: Path) -> None:
    code, err = titan(line(runs, text, "compile.warmup_timeout_s=0.5"))
    assert code == ExitCode.HANG, err
    assert "compile.warmup_timeout_s" in err


@pytest.mark.slow
def test_two_launchers_cannot_train_one_run(runs: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = start(line(runs, text, "training.steps=100000"))
    wait_for_step(RunFolder(runs / "r"), 1, process)
    code, err = refused(line(runs, text, "training.steps=100000"), capsys)
    process.terminate()
    assert finish(process)[0] == ExitCode.STOPPED
    assert code == ExitCode.USAGE
    assert f"process {process.pid}" in err


@pytest.mark.slow
def test_torchrun_refusing_its_arguments_is_a_usage_error(runs: Path, text: Path) -> None:
    code, err = titan([*line(runs, text), "--", "--nonsense"])
    assert code == ExitCode.USAGE, err
    assert "--nonsense" in err


def test_a_plan_for_another_torch_is_not_applied(runs: Path, text: Path) -> None:
    from titan_cli.errors import TitanError
    from titan_cli.plan.facts import parse_version
    from titan_cli.plan.planner import Plan
    from titan_cli.plan.target import build
    from titan_cli.worker.train import check_machine

    plan = build("llama3-debug", None, []).plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    check_machine(plan)
    from dataclasses import replace

    other = ".".join(map(str, (*parse_version(plan.torch)[:2], 99)))
    with pytest.raises(TitanError, match=other) as refused:
        check_machine(replace(plan, torch=other))
    assert refused.value.code == ExitCode.REFUSED
