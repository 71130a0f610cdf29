"""What this machine lacks for a run, found before anything is started. Each check is a function that returns problems."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from titan_cli.config import families, imports
from titan_cli.config.derive import not_trained_yet
from titan_cli.errors import ExitCode, TitanError
from titan_cli.hardware import has_cxx_compiler
from titan_cli.plan.target import Target
from titan_cli.tokenizer.tokenizer import vocab_size


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a run from starting, and what to do: advice, or the override that supplies what is missing."""

    what: str
    fix: str = ""
    supply: str = ""


def refuse(target: Target, command: str) -> None:
    """Raise one TitanError (refused, exit 3) with everything that is missing. `command` is the line to repeat in hints."""
    problems = [
        *not_yet(target),
        *model(target),
        *gpus(target),
        *memory(target),
        *compiler(target, os.environ),
        *tokenizer(target),
        *text(target, os.environ),
    ]
    if problems:
        hints = [*dict.fromkeys(p.fix for p in problems if p.fix)]
        if supplies := [p.supply for p in problems if p.supply]:
            hints.append(f"either  {command} {' '.join(supplies)}")
            hints.append(
                f"or      {command} data.source=python-stdlib tokenizer.name=titan   # same model and layout, no download"
            )
        raise TitanError("\n".join(p.what for p in problems), "\n".join(hints), ExitCode.REFUSED)


def not_yet(target: Target) -> list[Problem]:
    several = [
        Problem(
            f"launch.nodes={target.config.launch.nodes}: titan starts runs on one machine only, so far", "set launch.nodes=1"
        )
    ]
    return [*(Problem(what) for what in not_trained_yet(target.config)), *(several if target.config.launch.nodes > 1 else [])]


def model(target: Target) -> list[Problem]:
    """Whether a family of the user's own has what workers import; looked at as text, because it needs torch."""
    family = target.config.model.family
    return [] if family in families.FLAVORS else _module(f"{family}.model", "MODEL")


def _module(name: str, defines: str) -> list[Problem]:
    """Whether a module of the user's is there and defines something. The packages above it are imported."""
    guide = f"docs/add-a-model.md shows one; modules are looked for in {Path.cwd()} and on Python's path"
    try:
        found = imports.find(name)
        if found is None:
            return [Problem(f"there is no module {name}", guide)]
        return (
            [] if imports.may_define(found, defines) else [Problem(f"{name} ({found.origin}) does not define {defines}", guide)]
        )
    except Exception as error:  # it is the user's code
        return [Problem(f"{name}: {type(error).__name__}: {error}", f"see {imports.place(error)}")]


def gpus(target: Target) -> list[Problem]:
    """Whether the GPUs that the plan is for are here."""
    if target.device == "cpu":
        return []
    wanted, here = target.world.ranks_per_node, target.visible
    if len(here) < wanted:
        name = f" {target.gpu.name}" if target.gpu else ""
        return [
            Problem(
                f"needs {wanted}{name} GPUs on this machine, and {len(here)} are visible",
                "see `nvidia-smi` and CUDA_VISIBLE_DEVICES\n"
                "without GPUs: --dry-run shows the plan, and --preset debug trains on a CPU",
            )
        ]
    other = [gpu for gpu in here[:wanted] if target.gpu and gpu.capability != target.gpu.capability]
    if other and target.gpu:
        capability = ".".join(map(str, target.gpu.capability))
        return [
            Problem(
                f"planned for {target.gpu.name} (compute capability {capability}), but this machine has {other[0].name}",
                "set launch.gpu=auto to plan for the GPUs that are here",
            )
        ]
    return []


def memory(target: Target) -> list[Problem]:
    """Whether the states alone, which nothing but another layout makes smaller, exceed the device."""
    sizes = [gpu.memory_gib for gpu in (*target.visible[: target.world.ranks_per_node], target.gpu) if gpu]
    need = target.states.total / 2**30
    if target.device == "cpu" or not sizes or need <= min(sizes):
        return []
    return [
        Problem(
            f"will not fit: {target.states.sentence()}, before any activation; the device has {min(sizes):.1f} GiB",
            "use more ranks (parallelism.dp_shard, parallelism.tp, parallelism.pp), or a smaller model.flavor",
        )
    ]


def compiler(target: Target, environ: Mapping[str, str]) -> list[Problem]:
    """Whether what the plan compiles can be compiled here."""
    if not target.plan.wraps:
        return []
    off = [name for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE") if environ.get(name, "0") not in ("", "0")]
    if off:
        return [Problem(f"{off[0]} is set, which turns torch.compile off", f"unset {off[0]}, or say so: compile.strategy=off")]
    if target.device == "cpu" and target.plan.backend == "inductor" and not has_cxx_compiler():
        what = "inductor needs a C++ compiler on a CPU, and there is no g++ (or what $CXX names)"
        return [Problem(what, "install g++, or set compile.backend=aot_eager")]
    return []


def tokenizer(target: Target) -> list[Problem]:
    """Whether the tokenizer is here and its ids fit the embedding."""
    name, path = target.config.tokenizer.name, target.config.tokenizer.path
    try:
        size = vocab_size(name, path)
    except TitanError as error:
        if error.code == ExitCode.USAGE:
            raise
        if name == "llama3" and not path:
            return [Problem(error.message, META, supply="tokenizer.path=llama3/original/tokenizer.model")]
        return [Problem(error.message, error.hint)]
    if size > target.model.vocab_size:
        what = f"the tokenizer {path or name} has {size} ids, more than model.vocab_size = {target.model.vocab_size}"
        return [Problem(what, f"set model.vocab_size={-(-size // 64) * 64}")]
    return []


def text(target: Target, environ: Mapping[str, str]) -> list[Problem]:
    """Whether the text is here, or can be reached from here."""
    data = target.config.data
    module, is_own, function = data.source.partition(":")
    if is_own:
        taken = [Problem(f"data.path={data.path}: {data.source} is not told of it", "leave data.path out")] if data.path else []
        return [*taken, *_module(module, function)]
    if data.path:
        return _folder(Path(data.path), data.source)
    if data.source != "c4":
        return []
    offline = next(
        (name for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if environ.get(name, "0") not in ("", "0")), None
    )
    endpoint = environ.get("HF_ENDPOINT", "https://huggingface.co")
    why = f"{offline} is set" if offline else _unreachable(endpoint)
    if not why:
        return []
    return [Problem(f"data.source=c4 is streamed from {endpoint}, which cannot be reached: {why}", supply="data.path=FOLDER")]


def _folder(path: Path, source: str) -> list[Problem]:
    """Whether data.path is there and can be read."""
    if not path.exists():
        return [Problem(f"data.path={path}: no such file or folder")]
    if source == "python-stdlib" and not path.is_dir():
        return [Problem(f"data.path={path}: not a folder", "python-stdlib reads the *.py files below a folder")]
    if not os.access(path, os.R_OK):
        return [Problem(f"data.path={path}: cannot be read", "check its permissions")]
    return []


# The licence must be accepted on the model's page, so nothing can fetch it for the user.
META = (
    "Meta's tokenizer, once you have accepted the licence at huggingface.co/meta-llama/Llama-3.1-8B:\n"
    "        hf download meta-llama/Llama-3.1-8B original/tokenizer.model --local-dir llama3"
)

# torchrun options that follow from the configuration, and what to set instead.
_OURS = {"--nproc-per-node": "launch.gpus_per_node", "--nnodes": "launch.nodes", "--max-restarts": ""}


def torchrun_arguments(arguments: Sequence[str]) -> None:
    """Raise TitanError for the user's torchrun arguments that contradict the plan or name a port that is taken."""
    words = [word.replace("_", "-") if word.startswith("--") else word for word in arguments]
    for before, word in pairwise(["", *words]):
        if not word.startswith("-") and (not before.startswith("-") or "=" in before):
            raise TitanError(f"-- {word}: not a torchrun option", "options of the run stand before --; torchrun's begin with -")
    options = dict(word.partition("=")[::2] for word in words)
    options |= {name: value for name, value in pairwise(words) if name.startswith("--") and "=" not in name}
    for name, key in _OURS.items():
        if any(name.startswith(word) and len(word) > 3 for word in options):  # torchrun takes abbreviations
            raise TitanError(
                f"{name} is titan's own to set", f"set {key}=N" if key else "restarts are titan's: repeat the line"
            )
    for name in ("--rdzv-endpoint", "--master-port"):
        port = options.get(name, "").rpartition(":")[2]
        if port.isdigit() and int(port) and not _free(int(port)):
            hint = "choose another one, or leave it out: titan takes a free one"
            raise TitanError(f"port {port} of {name} is in use", hint, ExitCode.RENDEZVOUS)


def _free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _unreachable(url: str) -> str:
    """Why a server does not answer, in a few words; empty if it does, whatever it answers. Proxies are respected."""
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        return ""
    except OSError as error:
        return str(getattr(error, "reason", error))
    return ""
