"""Starts or continues a run: folder, attempt, plan, child process, and how it ended. What `titan train` does."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from titan_cli import __version__
from titan_cli.config import dump, presets
from titan_cli.config.layers import load
from titan_cli.config.schema import Config
from titan_cli.errors import ExitCode, TitanError
from titan_cli.launch import checks, command
from titan_cli.launch.process import Ending, Screen, Signals, Watcher, run_attempt
from titan_cli.plan.target import Target, build
from titan_cli.runs import records
from titan_cli.runs.folder import Attempt, RunFolder, committed_steps, last_committed
from titan_cli.runs.records import Event, Phase


@dataclass(frozen=True)
class Request:
    """What the command line asked for. `typed` are the words after `titan`, without those for torchrun."""

    typed: Sequence[str]
    preset: str | None = None
    config_file: str | None = None
    overrides: Sequence[str] = ()
    run_name: str | None = None
    fork: str | None = None
    torchrun_args: Sequence[str] = ()

    def line(self) -> str:
        """The command to repeat."""
        return shlex.join(["titan", *self.typed, *(["--", *self.torchrun_args] if self.torchrun_args else [])])


# What may differ between two attempts of one run; anything else would make it another experiment.
MAY_CHANGE = ("parallelism.", "compile.", "activation_checkpoint.", "launch.", "metrics.", "training.steps")


def resolve(request: Request) -> tuple[Target, RunFolder | None]:
    """The target, and the run's folder if it exists already. Raises TitanError (usage) for what contradicts the run."""
    run = _existing(request)
    if run is None:
        if request.preset is None and request.config_file is None:
            known = f"there is no run {request.run_name}, and no" if request.run_name else "no"
            meant = next((word for word in request.overrides if word in presets.names()), "debug")
            raise TitanError(f"{known} preset was named", f"titan train --preset {meant}    (`titan presets ls` lists them)")
        return build(request.preset, request.config_file, request.overrides), None
    if request.preset is None and request.config_file is None:
        name = records.read_json(run.status).get("preset", run.name)
        target = replace(build(None, str(run.config), request.overrides), name=name)
    else:
        target = build(request.preset, request.config_file, request.overrides)
    changed = differences(load(config_file=str(run.config)).config, target.config)
    if changed and (committed_steps(run) or run.metrics.is_file()):  # before its first step a run is free to change
        lines = [f"  {key}: {old} in the run, {new} now" for key, (old, new) in changed.items()]
        keep = " ".join(f"{key}={old}" for key, (old, _) in changed.items() if old is not None)
        raise TitanError(
            f"the run {run.name} exists with another configuration:\n" + "\n".join(lines),
            f"continue it as it is with --run {run.name} {keep}\n"
            f"or begin another: --run NEW_NAME (--fork {run.name} starts it from this run's last checkpoint)",
        )
    return target, run


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Values that differ and may not, by key."""
    before, after = dump.values(old), dump.values(new)
    return {k: (before[k], after[k]) for k in before if before[k] != after[k] and not k.startswith(MAY_CHANGE)}


# (target, run, attempt, step to continue from) -> where progress is shown
MakeScreen = Callable[[Target, RunFolder, int, int], contextlib.AbstractContextManager[Screen]]


def start(request: Request, make_screen: MakeScreen) -> Ending:
    """Check, create or continue the run's folder, train, and say how it ended. Raises TitanError before anything is spawned."""
    target, run = resolve(request)
    checks.torchrun_arguments(request.torchrun_args)
    checks.refuse(target, shlex.join(["titan", *request.typed]))
    if run is None:
        fork = _fork(request) if request.fork else None
        run = _create(target, request.run_name)
        if fork:
            records.write_json(run.fork, {"schema": 1, "from": request.fork, "checkpoint": str(fork)})
    elif request.fork and records.read_json(run.fork).get("from") != request.fork:
        began = records.read_json(run.fork).get("from", "fresh weights")
        raise TitanError(
            f"--fork {request.fork}: the run {run.name} exists and began from {began}", "choose another --run NAME"
        )
    with lock(run):
        saved = last_committed(run)
        if saved >= target.config.training.steps:
            return Ending(ExitCode.DONE, f"{run.name} is at step {saved} already", f"training.steps={saved * 2} goes on")
        attempt = _next_attempt(run, target, request)
        with make_screen(target, run, attempt.number, saved) as screen, Signals().handled() as signals:
            again = request.line() if request.run_name else f"titan train --run {run.name}{_elsewhere(target)}"
            watcher = Watcher(run, attempt, target.world.world_size, screen, saved, again)
            write_status = _status_writer(run, target, attempt, watcher)
            begin = _note(run, attempt, "attempt", f"{run.name}, attempt {attempt.number}, from step {saved + 1}")
            warnings = [_note(run, attempt, "alert", note, level="warn") for note in target.plan.notes]
            screen.feed([begin, *warnings], [])
            env = os.environ | environment(target)
            argv = torchrun(run, target, request)
            ending = run_attempt(watcher, argv, env, signals, target.config.compile.warmup_timeout_s, write_status)
            screen.feed([_write_ending(run, attempt, ending, write_status)], [])
    return ending


def _elsewhere(target: Target) -> str:
    runs_dir = target.config.launch.runs_dir
    return "" if runs_dir == "runs" else f" launch.runs_dir={shlex.quote(runs_dir)}"


def _write_ending(run: RunFolder, attempt: Attempt, ending: Ending, write_status: Callable[..., None]) -> dict[str, Any]:
    """The last status and event; returns the event. The terminal gets it also when the disk is full."""
    state = STATES.get(ending.code, "failed")
    level: Any = "alert" if state == "failed" else "info"
    code = {"code": int(ending.code)}
    event = Event("exit", ending.message, attempt.number, level=level, phase=state, step=ending.step, data=code)
    with contextlib.suppress(OSError):
        write_status(state, exit=int(ending.code), message=ending.message)
        records.append(run.events, event)
    return asdict(event)


# What status.json says after an ending; any other exit code is a failure.
STATES: dict[ExitCode, Phase] = {
    ExitCode.DONE: "done",
    ExitCode.STOPPED: "stopped",
    ExitCode.INTERRUPTED: "stopped",
    ExitCode.STOPPED_WITH_LOSS: "stopped",
}


def torchrun(run: RunFolder, target: Target, request: Request) -> list[str]:
    return command.torchrun(run.path.absolute(), target.world, request.torchrun_args)


def environment(target: Target) -> dict[str, str]:
    return command.environment(os.environ, target.device, target.world.ranks_per_node, os.cpu_count() or 1)


def dry_run(request: Request) -> str:
    """What `start` would do, as TOML with comments: configuration, derived numbers, plan, command, environment.

    Needs none of the hardware; what the machine lacks is said, not refused.
    """
    target, run = resolve(request)
    run = run or RunFolder(Path(target.config.launch.runs_dir).expanduser() / (request.run_name or _new_name(target)))
    parts = [
        dump.to_toml(target.config, {key: str(origin) for key, origin in target.origins.items()}),
        _section("derived", [f"{name}: {rule}" for name, rule in target.world.rules.items()]),
        _section("memory", [target.states.sentence() + ", before activations"]),
        _section("plan", json.dumps(target.plan.to_json(), indent=2).splitlines()),
        _section("command", [shlex.join(torchrun(run, target, request))]),
        _section("environment", [f"{name}={value}" for name, value in environment(target).items()]),
    ]
    try:
        checks.refuse(target, shlex.join(["titan", *request.typed]))
    except TitanError as error:
        parts.append(_section("would be refused here", [*error.message.splitlines(), *error.hint.splitlines()]))
    return "\n".join(parts)


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"# {title}", *(f"#   {line}" for line in lines)]) + "\n"


@contextlib.contextmanager
def lock(run: RunFolder) -> Iterator[None]:
    """Hold the run for this process; two launchers in one folder would overwrite each other's checkpoints."""
    with run.lock.open("w") as ours, run.workers_lock.open("w") as workers:
        try:
            fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = records.read_json(run.status).get("pid", "?")
            raise TitanError(
                f"the run {run.name} is being trained by another titan (process {pid})",
                "wait for it, or choose another --run NAME",
            ) from None
        _wait_for(workers, run)
        yield


def _wait_for(workers: TextIO, run: RunFolder) -> None:
    """Until the workers of a launcher that was killed have saved and ended: beside them, two histories would mix."""
    until = time.monotonic() + WORKERS_S
    while True:
        try:
            fcntl.flock(workers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            hint = f"end them (`pgrep -f {run.path.absolute()}`), or wait and repeat the line"
            raise TitanError(f"workers of an earlier start of {run.name} are still running", hint) from None
        fcntl.flock(workers, fcntl.LOCK_UN)
        return


# Workers that lost their launcher save and end; torchrun gives them 30 s.
WORKERS_S = 60.0


def _existing(request: Request) -> RunFolder | None:
    if request.run_name is None:
        return None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", request.run_name):
        raise TitanError(f"--run {request.run_name}: not a name", "use letters, digits, dots, dashes and underscores")
    runs_dir = _runs_dir(request)
    # `latest` is a link to a run: its own name is what counts.
    run = RunFolder((runs_dir / request.run_name).resolve())
    if run.config.is_file():
        return run
    if request.run_name == "latest":
        raise TitanError(f"--run latest: there is no run in {runs_dir} yet", "choose another name for a new run")
    return None


def _runs_dir(request: Request) -> Path:
    """The folder of runs. A layer may set it, so it is read before a run's own configuration is."""
    return Path(load(request.preset, request.config_file, request.overrides).config.launch.runs_dir).expanduser()


def _fork(request: Request) -> Path:
    """The checkpoint that --fork OLD[@STEP] names."""
    name, _, step = str(request.fork).partition("@")
    old = RunFolder(_runs_dir(request) / name)
    steps = committed_steps(old)
    wanted = int(step) if step.isdigit() else steps[-1] if steps and not step else None
    if wanted not in steps:
        there = (
            f"it has {', '.join(map(str, steps))}"
            if steps
            else "it has none"
            if old.path.is_dir()
            else f"there is no {old.path}"
        )
        raise TitanError(f"--fork {request.fork}: no such checkpoint", there, ExitCode.REFUSED)
    return old.checkpoint(wanted).resolve()


def _create(target: Target, name: str | None) -> RunFolder:
    runs_dir = Path(target.config.launch.runs_dir).expanduser()
    run = RunFolder(runs_dir / (name or _new_name(target)))
    if run.path.is_dir() and any(run.path.iterdir()) and not run.lock.is_file():
        raise TitanError(f"{run.path} exists and is not a run", "choose another --run NAME")
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        run.lock.touch()
    except OSError as error:
        raise TitanError(
            f"cannot write the run's folder {run.path}: {error.strerror}",
            "set launch.runs_dir to a folder you can write",
            ExitCode.REFUSED,
        ) from None
    return run


def _new_name(target: Target) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", target.name).strip("-.") or "run"  # one that --run accepts
    return f"{name}-{time.strftime('%y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _next_attempt(run: RunFolder, target: Target, request: Request) -> Attempt:
    """attempts/N with this attempt's own configuration, plan, command and environment, and copies of them at the root."""
    earlier = run.attempts()
    attempt = run.attempt(earlier[-1].number + 1 if earlier else 1)
    attempt.path.mkdir(parents=True)
    for folder in (RunFolder(attempt.path), run):  # an attempt's folder has the same names; the root's are replaced last
        records.write_json(folder.plan, target.plan.to_json())
        records.write_json(folder.origin, dump.origins_json(target.origins))
        records.write_text(folder.command, request.line() + "\n")
        records.write_json(folder.env, _environment_record())
        records.write_text(folder.config, dump.to_toml(target.config))
    link = run.path.parent / "latest"
    with contextlib.suppress(OSError):  # a convenience; some file systems have no links
        temporary = link.with_name(f".latest.{os.getpid()}")
        temporary.symlink_to(run.name)
        temporary.replace(link)
    return attempt


PACKAGES = ("torch", "triton", "datasets", "tiktoken", "tokenizers", "pydantic", "numpy")


def _environment_record() -> dict[str, Any]:
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # triton is not part of a CPU build
            packages[name] = version(name)
    return {
        "schema": 1,
        "titan": __version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "platform": platform.platform(),
        "packages": packages,
        "environment": command.recorded(os.environ),
    }


def _status_writer(run: RunFolder, target: Target, attempt: Attempt, watcher: Watcher) -> Callable[..., None]:
    begun = time.time()

    def write(state: str, exit: int | None = None, message: str = "") -> None:
        content = {
            "schema": 1,
            "state": state,
            "step": watcher.step,
            "steps": target.config.training.steps,
            "saved_step": watcher.saved_step,
            "attempt": attempt.number,
            "preset": target.name,
            "pid": os.getpid(),
            "host": platform.node(),
            "started": begun,
            "heartbeat": time.time(),
            "exit": exit,
            "message": message,
        }
        records.write_json(run.status, content)

    return write


def _note(run: RunFolder, attempt: Attempt, kind: Any, message: str, **fields: Any) -> dict[str, Any]:
    """Write an event of the launcher's own to events.jsonl; returns it as a record."""
    event = Event(kind, message, attempt.number, **fields)
    records.append(run.events, event)
    return asdict(event)
