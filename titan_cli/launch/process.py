"""Runs torchrun as a child: watches its run folder, passes signals on, and names the cause when it fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, Protocol

import psutil

from titan_cli.errors import ExitCode
from titan_cli.orphans import end_with_parent
from titan_cli.runs import records
from titan_cli.runs.folder import Attempt, RunFolder
from titan_cli.runs.records import Event, LogTail, Tail

POLL_S = 0.1
HEARTBEAT_S = 5.0
LOG_BYTES = 65536  # of the log that are read at once; a flood is skipped
ORPHANS_S = 60.0


class Screen(Protocol):
    """Where the launcher shows what it reads."""

    def feed(self, found: Sequence[dict[str, Any]], log_lines: Sequence[str]) -> None: ...
    def tick(self, now: float) -> None: ...


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. `rank`, `where` and `log` say where to look when it failed."""

    code: ExitCode
    message: str
    hint: str = ""
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    where: str = ""
    log: str = ""


@dataclass
class Signals:
    """Signals this launcher received, in order. The handler only notes them; the loop acts."""

    received: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def handled(self) -> Iterator[Signals]:
        def note(number: int, frame: FrameType | None) -> None:
            self.received.append(number)

        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before = {number: signal.signal(number, note) for number in caught}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal is no reason to stop
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Watcher:
    """One attempt's child process and everything that is read from its folder while it runs."""

    def __init__(
        self, run: RunFolder, attempt: Attempt, ranks: int, screen: Screen, saved_step: int = 0, again: str = ""
    ) -> None:
        self.run, self.attempt, self.ranks, self.screen = run, attempt, ranks, screen
        self.again = again  # the command that continues the run
        self.events = [Tail(attempt.rank_events(rank)) for rank in range(ranks)]
        self.metrics = Tail(run.metrics)
        self.metrics.read()  # what earlier attempts wrote was shown when they ran
        self.log = LogTail(attempt.rank_log(0), at_most=LOG_BYTES)
        self.workers: dict[int, psutil.Process] = {}
        self.told: set[int] = set()
        self.phases = dict.fromkeys(range(ranks), "starting")
        self.exits: dict[int, int] = {}
        self.step = self.saved_step = saved_step  # the last that is known to be finished, and committed
        self.begun = time.time()

    def read(self) -> None:
        """Take in what the ranks wrote since the last call and show it."""
        found = [event for tail in self.events for event in tail.read()]
        for event in found:
            self._note(event)
        lines = self.metrics.read()
        self.step = max([self.step, *(line["step"] for line in lines if line["loss"] is not None)])
        shown = [event for event in found if event["rank"] == 0 or event["level"] != "info"]
        self.screen.feed([*shown, *lines], self.log.read())

    def _note(self, event: dict[str, Any]) -> None:
        rank = event["rank"]
        if "pid" in event["data"]:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.workers[rank] = psutil.Process(event["data"]["pid"])
        self.phases[rank] = event["phase"] or self.phases[rank]
        if event["kind"] == "checkpoint" and rank == 0:
            self.saved_step = event["data"]["step"]
            self.step = max(self.step, self.saved_step)
        if event["kind"] == "exit":
            self.exits[rank] = event["data"]["code"]
        if event["kind"] in ("phase", "alert", "signal") and (rank == 0 or event["level"] != "info"):
            with contextlib.suppress(OSError):  # as for the heartbeat
                records.append(self.run.events, event)

    def acknowledge(self, number: int) -> None:
        """Tell the person who pressed Ctrl-C that it was heard: a step or a warm-up can take minutes to end."""
        when = "the warm-up" if self.phases[0] in ("starting", "building", "compiling") else "this step"
        text = f"{signal.Signals(number).name}: stopping after {when} and saving; a second one stops at once"
        event = Event("signal", text, self.attempt.number, phase="stopping")
        records.append(self.run.events, event)
        self.screen.feed([asdict(event)], [])

    def ask_to_stop(self) -> None:
        """SIGTERM to each worker, once; a worker that has not started yet is told when it has."""
        for rank, worker in self.workers.items():
            if rank not in self.told:
                self.told.add(rank)
                with contextlib.suppress(psutil.NoSuchProcess):  # ended by itself meanwhile
                    worker.terminate()

    def late(self, warmup_timeout_s: float, now: float) -> list[int]:
        """Ranks that are not training although the attempt began longer ago than warming up may take."""
        slow = ("starting", "building", "compiling")
        return [r for r, phase in self.phases.items() if phase in slow] if now - self.begun > warmup_timeout_s else []


def run_attempt(
    watcher: Watcher,
    argv: Sequence[str],
    env: Mapping[str, str],
    signals: Signals,
    warmup_timeout_s: float,
    heartbeat: Callable[[str], None],
) -> Ending:
    """Start the child and stay with it until it has ended and everything it wrote was read. No process outlives this call.

    `heartbeat` is called with the state (a status.json word) every few seconds and whenever the state changes.
    """
    forced: Callable[[], Ending] | None = None
    with watcher.attempt.torchrun_log.open("ab") as log:
        # Its own session: Ctrl-C in the terminal must reach the launcher alone, which then lets the workers save.
        child = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
    told, told_at, heard = "", 0.0, False
    try:
        while child.poll() is None and forced is None:
            watcher.read()
            now = time.time()
            if signals.received:
                if not heard:
                    heard = True
                    watcher.acknowledge(signals.received[0])
                watcher.ask_to_stop()
            if len(signals.received) > 1:
                forced = partial(_second_signal, watcher, signals)
            elif late := watcher.late(warmup_timeout_s, now):
                forced = partial(_hang, watcher, late, warmup_timeout_s)
            state = "stopping" if signals.received else watcher.phases[0]
            if state != told or now - told_at > HEARTBEAT_S:
                told, told_at = state, now
                with contextlib.suppress(OSError):  # a full disk: the rank that cannot save says so, and why
                    heartbeat(state)
            watcher.screen.tick(now)
            time.sleep(POLL_S)
        if forced is None and child.returncode:
            # Workers of a torchrun that was killed were told to stop by Linux; give them the time to save.
            psutil.wait_procs(list(watcher.workers.values()), timeout=ORPHANS_S)
    except BaseException:
        # A full disk, or our own mistake: no reason to lose what the workers have trained.
        watcher.ask_to_stop()
        psutil.wait_procs(list(watcher.workers.values()), timeout=ORPHANS_S)
        raise
    finally:
        kill(child, watcher.workers.values())
    watcher.read()
    return forced() if forced else _ending(watcher, child.returncode, signals)


def kill(child: subprocess.Popen[bytes], workers: Iterable[psutil.Process]) -> None:
    """End the child, the workers and all that they started (compilers, data readers); those that have ended are left alone."""
    processes = [*workers]
    if child.poll() is None:  # once it has been waited for, its number may be another process's
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(child.pid))
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
    child.wait()


def _second_signal(watcher: Watcher, signals: Signals) -> Ending:
    # While it trains, steps end that nobody has told us of yet.
    lost = watcher.step > watcher.saved_step or watcher.phases[0] == "running"
    interrupted = signals.received[0] == signal.SIGINT
    code = ExitCode.INTERRUPTED if interrupted else ExitCode.STOPPED_WITH_LOSS if lost else ExitCode.STOPPED
    what = f"what followed step {watcher.saved_step} is lost" if lost else _saved(watcher)
    return Ending(code, f"stopped at once by a second signal; {what}; to continue: {watcher.again}", step=watcher.step)


def _hang(watcher: Watcher, late: list[int], warmup_timeout_s: float) -> Ending:
    rank = late[0]
    phase = watcher.phases[rank]
    return Ending(
        ExitCode.HANG,
        f"ranks {late[:8]} are {phase} for more than compile.warmup_timeout_s = {warmup_timeout_s:g} s",
        "look at the rank's log for what it waits for, or raise compile.warmup_timeout_s",
        rank,
        watcher.step,
        phase,
        log=str(watcher.attempt.rank_log(rank)),
    )


def _ending(watcher: Watcher, returncode: int, signals: Signals) -> Ending:
    """What the folder says happened. Error files name causes; torchrun's own status only says that something failed."""
    log = watcher.attempt.torchrun_log.read_text(errors="replace")
    if len(watcher.exits) == watcher.ranks:  # whatever torchrun says: it may have been told to stop, too
        return _ended_well(watcher, signals)
    errors = [e for rank in range(watcher.ranks) if (e := records.read_json(watcher.attempt.rank_error(rank)))]
    causes = sorted((e for e in errors if not e["peer"]), key=lambda e: e["time"])
    if causes:
        return _from_error(watcher, causes[0])
    if stuck := _stuck(watcher, errors):
        ending = _at_rank(watcher, stuck[0], ExitCode.HANG, f"ranks {stuck[:8]} did not join a collective in launch.timeout_s")
        return replace(ending, hint="look at the rank's log and its process for what it waits for, or raise launch.timeout_s")
    if killed := _killed_rank(log):
        rank, number = killed
        name = signal.Signals(number).name
        oom = "; if nobody sent it, look for the kernel's out-of-memory killer (dmesg)" if number == signal.SIGKILL else ""
        ending = _at_rank(watcher, rank, ExitCode.WORKER_KILLED, f"rank {rank} was killed by {name}")
        return replace(ending, hint=f"to continue: {watcher.again}" + oom)
    if errors:
        return _from_error(watcher, min(errors, key=lambda e: e["time"]))
    if signals.received and not watcher.workers:
        code = ExitCode.INTERRUPTED if signals.received[0] == signal.SIGINT else ExitCode.STOPPED
        return Ending(code, "stopped before the workers had started; nothing to save")
    return _torchrun_failed(watcher, log, returncode)


def _ended_well(watcher: Watcher, signals: Signals) -> Ending:
    """All ranks said that they are done, or that they stopped because they were asked to."""
    code = ExitCode(max(watcher.exits.values()))
    if code == ExitCode.DONE:
        return Ending(code, f"done at step {watcher.step}", step=watcher.step)
    what = _saved(watcher)
    if code == ExitCode.STOPPED_WITH_LOSS:
        what = f"what followed step {watcher.saved_step} is lost (checkpoint.at_end=false)"
    if signals.received[:1] == [signal.SIGINT]:
        code = ExitCode.INTERRUPTED
    return Ending(code, f"stopped, {what}; to continue: {watcher.again}", step=watcher.step)


def _saved(watcher: Watcher) -> str:
    return f"step {watcher.saved_step} is saved" if watcher.saved_step else "nothing new to save"


def _stuck(watcher: Watcher, errors: list[dict[str, Any]]) -> list[int]:
    """Ranks that wrote no error while all others gave up waiting for a collective; [] if that is not what happened."""
    if not errors or not all(e["peer"] for e in errors) or not any(e["exit"] == ExitCode.HANG for e in errors):
        return []
    failed = {e["rank"] for e in errors}
    return [rank for rank in range(watcher.ranks) if rank not in failed] or [errors[0]["rank"]]


def _from_error(watcher: Watcher, error: dict[str, Any]) -> Ending:
    rank = error["rank"]
    message = error["message"]
    if error["type"] != "TitanError":  # torch's messages can be pages; the log has all of it
        first = next((line.strip() for line in message.splitlines() if line.strip()), "")
        message = f"{error['type']}: {first[:300]}"
    return Ending(
        ExitCode(error["exit"]),
        message,
        error.get("hint", ""),
        rank,
        error["step"],
        error["phase"],
        error["where"],
        str(watcher.attempt.rank_log(rank)),
    )


def _at_rank(watcher: Watcher, rank: int, code: ExitCode, message: str) -> Ending:
    return Ending(code, message, "", rank, watcher.step, watcher.phases[rank], log=str(watcher.attempt.rank_log(rank)))


def _killed_rank(torchrun_log: str) -> tuple[int, int] | None:
    """(rank, signal) of the first worker that torchrun saw die of a signal other than the ones we send."""
    for rank, number in re.findall(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*-(\d+)", torchrun_log):
        if int(number) != signal.SIGTERM:
            return int(rank), int(number)
    return None


def _torchrun_failed(watcher: Watcher, log: str, returncode: int) -> Ending:
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "")
    path = str(watcher.attempt.torchrun_log)
    if returncode < 0:
        name = signal.Signals(-returncode).name
        message = f"torchrun was killed by {name}; {_saved(watcher)}"
        return Ending(ExitCode.WORKER_KILLED, message, f"to continue: {watcher.again}", step=watcher.step, log=path)
    if "EADDRINUSE" in log or "address already in use" in log.lower():
        return Ending(
            ExitCode.RENDEZVOUS, "the rendezvous port is in use", "choose another one, or leave it out for a free one", log=path
        )
    if any(word in log for word in ("RendezvousConnectionError", "RendezvousTimeoutError", "DistNetworkError")):
        return Ending(
            ExitCode.RENDEZVOUS, f"the ranks did not find each other: {last}", "check the rendezvous address", log=path
        )
    if "usage: run.py" in log or "unrecognized arguments" in log:
        return Ending(
            ExitCode.USAGE, f"torchrun refused its arguments: {last}", "see the arguments after -- in your command", log=path
        )
    return Ending(
        ExitCode.UNEXPECTED, f"torchrun ended with status {returncode} and no rank said why: {last}", "see the log", log=path
    )
