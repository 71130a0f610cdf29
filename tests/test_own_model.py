"""A user's own model and data, made in an empty folder from the code blocks of docs/add-a-model.md and from nothing else."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from titan_cli.cli import main
from titan_cli.config import imports
from titan_cli.config.layers import load
from titan_cli.config.schema import Config
from titan_cli.errors import ExitCode, TitanError
from titan_cli.models.common.decoder import Decoder
from titan_cli.models.llama3.config import FLAVORS as LLAMA3
from titan_cli.runs import records
from titan_cli.runs.folder import RunFolder
from titan_cli.tokenizer.tokenizer import load as load_tokenizer
from titan_cli.worker.data import build_data
from titan_cli.worker.family import make_model

PAGE = (Path(__file__).parent.parent / "docs/add-a-model.md").read_text()
BLOCKS = re.findall(r"^`([\w/.]+)`\n\n```\w+\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^titan (.*)", PAGE, flags=re.MULTILINE)

# float64 and eager kernels, because layouts are compared to the last digits; a learning rate that shows within six steps.
STEPS = 6
SHORT = f"training.steps={STEPS} training.dtype=float64 compile.backend=aot_eager metrics.log_every=1 optimizer.lr=1e-2"

# -P: as the command `titan`, whose path lacks the current folder.
TITAN = [sys.executable, "-P", "-c", "import sys; from titan_cli.cli import main; sys.exit(main())"]


def write(folder: Path) -> Path:
    for name, text in BLOCKS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("project"))


def titan(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TITAN, *words], cwd=folder, capture_output=True, text=True, check=False)


def train(folder: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """The metrics of a run of the page's preset, which must end well."""
    done = titan(folder, "train", "--config", "mine.toml", "--run", name, *SHORT.split(), *words)
    assert done.returncode == ExitCode.DONE, done.stderr
    return records.read(RunFolder(folder / "runs" / name).metrics)


def losses(metrics: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in metrics]


def test_the_page_is_short() -> None:
    assert [name for name, _ in BLOCKS] == ["mine/config.py", "mine/tp_plan.py", "mine/model.py", "mine/data.py", "mine.toml"]
    assert sum(text.count("\n") for _, text in BLOCKS) <= 150


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_planned_without_torch(command: str, project: Path) -> None:
    script = "import sys; from titan_cli.cli import main; code = main(); assert 'torch' not in sys.modules; sys.exit(code)"
    dry = ["--dry-run"] if command.startswith("train") else []
    words = [sys.executable, "-P", "-c", script, *command.split(), *dry]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "would be refused" not in done.stdout
    assert ("4 dense" if not dry else 'family = "mine"') in done.stdout


def test_it_trains_in_parallel(project: Path) -> None:
    fallen = losses(train(project, "tp", "parallelism.tp=2"))
    assert len(fallen) == STEPS
    assert fallen[-1] < fallen[0] - 0.3
    # compile.strict stops a run whose blocks are not all compiled or whose gradients are not all alive; here is what it saw.
    events = records.read(RunFolder(project / "runs" / "tp").attempt(1).rank_events(0))
    said = {event["kind"]: event["message"] for event in events}
    assert said["compile_health"] == "4/4 blocks compiled, 0 breaks, 0 recompiles"
    assert said["gradient_audit"] == "52/52 gradients alive"
    assert all(f"`{message}`" in PAGE for message in (said["compile_health"], said["gradient_audit"]))


LAYOUTS = {
    "2d": "parallelism.dp_shard=2 parallelism.tp=2",
    "whole": "parallelism.tp=2 parallelism.sequence_parallel=false activation_checkpoint.mode=full",
    "cp": "parallelism.cp=2",
    "pp": "parallelism.pp=2 training.local_batch_size=2 metrics.eval_every=3",
    "compiled": "parallelism.tp=2 compile.backend=auto",
}


@pytest.fixture(scope="module")
def one_rank(project: Path) -> list[float]:
    return losses(train(project, "one-rank"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_like_one_rank(layout: str, project: Path, one_rank: list[float]) -> None:
    assert one_rank[-1] < one_rank[0] - 0.3
    assert losses(train(project, layout, *LAYOUTS[layout].split())) == pytest.approx(one_rank, rel=1e-9)


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_its_data(project: Path) -> None:
    constant = ("lr_schedule.name=wsd", "lr_schedule.decay_share=0")  # a rate that does not depend on the number of steps
    train(project, "resumed", *constant, "training.steps=3")
    metrics = train(project, "resumed", *constant)
    whole = train(project, "unstopped", *constant)
    assert [line["attempt"] for line in metrics] == [1, 1, 1, 2, 2, 2]
    assert losses(metrics) == losses(whole)


@pytest.mark.slow
def test_what_a_data_function_raises_ends_the_run_and_its_line_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    broken = folder / "mine" / "data.py"
    broken.write_text('def documents(held_out):\n    yield "text " * 9999\n    raise OSError("the disk is on fire")\n')
    done = titan(folder, "train", "--config", "mine.toml", *SHORT.split(), "training.global_batch_size=64")
    assert done.returncode == ExitCode.WORKER_EXCEPTION, done.stderr
    assert "the disk is on fire" in done.stderr
    assert f"{broken}:3 in documents" in done.stderr


# What is wrong with a package, found before anything is started.


@dataclass(frozen=True)
class Case:
    """One edit of the page's package, what is asked for beside it, and what the refusal says."""

    says: str
    code: int = 3
    file: str = "config.py"
    old: str = ""
    new: str = ""
    words: tuple[str, ...] = ()


CASES = {
    "no_config": Case("there is no own.config", file="config.py"),
    "no_tp_plan": Case("there is no own.tp_plan", file="tp_plan.py"),
    "no_model": Case("there is no module own.model", file="model.py"),
    "no_flavors": Case("own.config has no FLAVORS", old="FLAVORS = ", new="FLAVOURS = "),
    "no_plan": Case("own.tp_plan has no TP_PLAN", file="tp_plan.py", old="TP_PLAN", new="PLAN"),
    "no_class": Case("does not define MODEL", file="model.py", old="MODEL = Mine", new=""),
    "not_a_decoder": Case("FLAVORS.*is no titan_cli.models.common", old='"small": MineConfig(', new='"small": dict('),
    "incomplete": Case("abstract method '?tp_sizes", old="def tp_sizes", new="def sizes"),
    "raises": Case("ZeroDivisionError.*\n.*own/config.py:1;", old="from dataclasses", new="1 / 0; from dataclasses"),
    "syntax": Case("SyntaxError.*\n.*own/config.py:7;", old="class MineConfig(Decoder):", new="class (Decoder):"),
    "needs_missing": Case("No module named 'nowhere'", old="from dataclasses", new="import nowhere; from dataclasses"),
    "style": Case('output = "heads"; the styles are embedding', file="tp_plan.py", old='"head"', new='"heads"'),
    "unnamed": Case(
        "no style for norm.weight.* 1 more", file="tp_plan.py", old='    "norm"', new='    "nrm"', words=("parallelism.tp=2",)
    ),
    "model_syntax": Case("own.model: SyntaxError.*\n.*model.py:", file="model.py", old="class Mine", new="class"),
    "degree": Case("tp can be 1, 2, 4", code=2, words=("parallelism.tp=3",)),
    "dimension": Case("own has no such dimension", code=2, words=("model.n_kv_heads=2",)),
    "contradiction": Case("dim 64 must be n_heads 64 x", code=2, words=("model.n_heads=64",)),
    "flavor": Case("Did you mean small", code=2, words=("model.flavor=smal",)),
    "misspelt": Case("Did you mean own[?]", code=2, words=("model.family=ownn",)),
    "misspelt_ours": Case("Did you mean llama3[?]", code=2, words=("model.family=lama3",)),
    "nowhere": Case("no package no.such", code=2, words=("model.family=no.such",)),
    "not_a_name": Case("package.module", code=2, words=("model.family=my-model",)),
    "not_a_source": Case("package.module:function", code=2, words=("data.source=c5",)),
    "no_data": Case("there is no module own.dat\n", words=("data.source=own.dat:documents",)),
    "no_function": Case("does not define docs\n", words=("data.source=own.data:docs",)),
    "data_path": Case("is not told of it", words=("data.path=.",)),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's package as `own`, in the current folder; what is imported of it is forgotten afterwards."""
    write(tmp_path)
    (tmp_path / "mine").rename(tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
        del sys.modules[name]
    importlib.invalidate_caches()


OWN = ("model.family=own", "data.source=own.data:documents")


@pytest.mark.parametrize("name", CASES)
def test_a_package_that_cannot_be_used_is_refused_and_nothing_is_started(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    file = folder / "own" / case.file
    if case.old:
        assert case.old in file.read_text()
        file.write_text(file.read_text().replace(case.old, case.new))
    elif not case.words:
        file.unlink()
    code = main(["train", "--config", "mine.toml", *OWN, *case.words])
    err = capsys.readouterr().err
    assert code == case.code, err
    assert re.search(case.says, err), err
    assert not (folder / "runs").exists()


def test_a_config_that_imports_torch_is_refused(tmp_path: Path) -> None:
    config = write(tmp_path) / "mine" / "config.py"
    config.write_text("import torch\n" + config.read_text())
    (tmp_path / "torch.py").touch()  # a torch that is there at once
    done = titan(tmp_path, "explain-compile", "--config", "mine.toml")
    assert done.returncode == ExitCode.REFUSED, done.stderr
    assert "mine.config imports torch" in done.stderr
    assert "PACKAGE.model" in done.stderr


def test_dimensions_of_the_schema_can_be_set(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.n_layers=6", "model.ffn_dim=128", "parallelism.tp=2"]
    assert main(["explain-compile", "--config", "mine.toml", *OWN, *words]) == ExitCode.DONE
    assert "layers.0 .. 5" in capsys.readouterr().out


def test_a_rule_about_llama_also_protects_an_unknown_family(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallelism.tp=2", "activation_checkpoint.mode=full", "--torch", "2.13.0"]
    assert main(["explain-compile", "--config", "mine.toml", *OWN, *words]) == ExitCode.DONE
    assert "tp-ac-inside" in capsys.readouterr().out.partition("rejected")[2]


# What only a worker can see.


def configured(*words: str) -> Config:
    return load(None, "mine.toml", [*OWN, *words]).config


def test_the_modules_parameters_are_those_of_the_config(folder: Path) -> None:
    model, tp_plan = make_model(configured())
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == model.config.shapes()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert tp_plan["output"] == "head"


@pytest.mark.parametrize(
    ("old", "new", "words", "says"),
    [
        ("ffn_dim)", "ffn_dim - 1)", (), r"layers.0.feed_forward.up.weight is \(255, 64\), and in the config \(256, 64\)"),
        ("nn.LayerNorm(config.dim)", "nn.LayerNorm(config.dim, bias=False)", (), r"norm.bias is missing, and in .* \(64,\)"),
        ("config.dim, bias=False)", "config.dim)", (), r"wo.bias is \(64,\), and in the config missing"),
        ("config.dim, bias=False)", "config.dim)", (), "and 4 other parameters are not as in the config"),
        ('kind = "dense"', "", (), "each block must have its kind, one of dense"),
        ("def init_std", "def initial_std", (), "there is no method init_std"),
        (
            "SDPA()",
            "torch.nn.functional.scaled_dot_product_attention",
            ("parallelism.cp=2",),
            "parallelism.cp=2 needs a kernel",
        ),
        ("", "", ("model.attention=flex",), "model.attention=flex, but there is no"),
    ],
)
def test_a_module_that_is_not_what_was_planned_is_refused(
    old: str, new: str, words: tuple[str, ...], says: str, folder: Path
) -> None:
    file = folder / "own" / "model.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(TitanError, match=f"own.model: {says}|\n.*{says}") as raised:
        make_model(configured(*words))
    assert raised.value.code == ExitCode.REFUSED


# Data.

SEQ = 16
DATA = """
def documents(held_out):
    for i in range(40):
        if (i % 4 == 0) == held_out:
            yield f"document {i} says {i} " * 5
"""


def sourced(text: str, *words: str) -> Any:
    """The data of a function `documents` with this text, in own/data.py."""
    Path("own/data.py").write_text(text)
    sys.modules.pop("own.data", None)
    importlib.invalidate_caches()
    tiny = (f"training.seq_len={SEQ}", "training.global_batch_size=4", "metrics.eval_sequences=4", *words)
    return build_data(configured(*tiny), 0, 1, load_tokenizer("titan"))


def batches(data: Any, steps: int) -> list[Any]:
    return [batch.inputs.tolist() for step in range(1, steps + 1) for batch in data.micro_batches(step)]


def test_documents_come_in_their_order_and_begin_again(folder: Path) -> None:
    tokenizer = load_tokenizer("titan")
    data = sourced(DATA)
    ids = [token for i in range(40) if i % 4 for token in tokenizer.encode_document(f"document {i} says {i} " * 5)]
    epoch = len(ids[1:]) // SEQ
    rows = [row for batch in batches(data, epoch // 4 + 2) for row in batch]
    assert rows[:epoch] == [ids[i * SEQ : (i + 1) * SEQ] for i in range(epoch)]
    assert rows[epoch : epoch + 3] == rows[:3]
    held_out = "".join(tokenizer.decode(row) for batch in data.eval_batches() for row in batch.inputs.tolist())
    assert "document 0 says 0" in held_out


def test_a_later_start_reads_what_comes_next(folder: Path) -> None:
    data, later = sourced(DATA), sourced(DATA)
    assert batches(data, 5)[4 * 4 :] == [batch.inputs.tolist() for batch in later.micro_batches(5)]


def test_a_function_without_end_is_no_harm(folder: Path) -> None:
    endless = DATA.replace("range(40)", "__import__('itertools').count()")
    assert len(batches(sourced(endless), 2)) == 8


def test_the_fingerprint_knows_how_the_documents_begin(folder: Path) -> None:
    known = sourced(DATA).fingerprint
    assert sourced(DATA).fingerprint == known
    assert sourced("# a comment\n" + DATA).fingerprint == known
    assert sourced(DATA.replace("says", "told")).fingerprint != known
    assert sourced(DATA, "training.seq_len=8").fingerprint != known
    # What comes after the first sequences it cannot know.
    assert sourced(DATA.replace("range(40)", "range(44)")).fingerprint == known


UNSEEDED = "import random\n\ndef documents(held_out):\n    while True:\n        yield str(random.random())\n"
USED_UP = "texts = iter(['one text ' * 99])\n\ndef documents(held_out):\n    return texts\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (UNSEEDED, "yields other documents the second time"),
        (USED_UP, "yields other documents the second time"),
        ("def documents(held_out):\n    return 'one text' * 99\n", "gives one str, not documents"),
        ("def documents(held_out):\n    print(held_out)\n", "gives one NoneType, not documents"),
        ("def documents(held_out):\n    yield b'bytes'\n", "yields a bytes for a document"),
        ("def documents(held_out):\n    yield 'short'\n", "shorter than one sequence"),
        ("documents = 3\n", "own.data has no function documents"),
    ],
)
def test_a_function_that_is_no_source_is_refused(text: str, says: str, folder: Path) -> None:
    with pytest.raises(TitanError, match=says) as raised:
        sourced(text)
    assert raised.value.code == ExitCode.REFUSED


def test_a_split_without_text_is_refused_only_if_it_is_needed(folder: Path) -> None:
    nothing_held = "def documents(held_out):\n    return [] if held_out else ['some text ' * 99]\n"
    sourced(nothing_held)
    with pytest.raises(TitanError, match="held-out split is shorter") as raised:
        sourced(nothing_held, "metrics.eval_every=1")
    assert "a source of your own" in raised.value.hint


def test_what_a_function_raises_is_not_hidden(folder: Path) -> None:
    with pytest.raises(KeyError, match="lost"):
        sourced("def documents(held_out):\n    yield 'text'\n    raise KeyError('lost')\n")


# The parts.


@pytest.mark.parametrize(
    ("text", "defines"),
    [
        ("MODEL = 1", True),
        ("MODEL: int = 1", True),
        ("class MODEL: pass", True),
        ("def MODEL(): pass", True),
        ("if 1:\n    from x import y as MODEL", True),
        ("from x import MODEL", True),
        ("from x import *", True),
        ("def __getattr__(name): ...", True),
        ("model = MODEL", False),
        ("from MODEL import x", False),
        ("# MODEL = 1", False),
        ("", False),
    ],
)
def test_a_name_is_looked_for_without_importing(text: str, defines: bool, folder: Path) -> None:
    (folder / "own" / "text.py").write_text(text)
    found = imports.find("own.text")
    assert found
    assert imports.may_define(found, "MODEL") == defines
    assert "own.text" not in sys.modules


def test_the_shared_arithmetic_is_llamas() -> None:
    llama = LLAMA3["debug"]

    @dataclass(frozen=True, kw_only=True)
    class AsLlama(Decoder):
        def block_shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
            return llama.block_shapes(kind)

        def tp_sizes(self) -> dict[str, int]:
            return llama.tp_sizes()

    same = AsLlama(dim=llama.dim, n_layers=llama.n_layers, vocab_size=llama.vocab_size)
    numbers: list[Callable[[Any], Any]] = [
        lambda c: list(c.shapes().items()),
        lambda c: c.parameter_count(),
        lambda c: c.block_kinds(),
        lambda c: c.block_flops_per_token("dense", 96),
        lambda c: c.head_flops_per_token(),
        lambda c: c.flops_per_token(96),
    ]
    assert [number(same) for number in numbers] == [number(llama) for number in numbers]
