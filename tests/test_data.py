"""The same tokens in the same order: for every number of ranks, any accumulation, and after every restart."""

from __future__ import annotations

import gzip
import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from titan_cli.config.schema import Config
from titan_cli.errors import ExitCode, TitanError
from titan_cli.tokenizer.tokenizer import Tokenizer, load
from titan_cli.worker.data import Data, build_data, cut, order, pack, pick, windows

SEQ = 16


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load("titan")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Thirty modules of different lengths, each with its own number in every line."""
    folder = tmp_path / "library"
    (folder / "pkg").mkdir(parents=True)
    for i in range(30):
        path = folder / ("pkg" if i % 3 else ".") / f"m{i:02d}.py"
        path.write_text("".join(f"value_{i} = {i} * {line}\n" for line in range(3 + i % 7)))
    return folder


@pytest.fixture
def c4_folder(tmp_path: Path) -> Path:
    """Two files of c4's format, forty documents."""
    folder = tmp_path / "c4"
    folder.mkdir()
    write_c4(folder / "c4-train.00000-of-00002.json.gz", range(20))
    write_c4(folder / "c4-train.00001-of-00002.json.gz", range(20, 40))
    return folder


def write_c4(path: Path, numbers: range) -> None:
    docs = [
        {"text": f"Document {i}. " + f"The number is {i}. " * (1 + i % 5), "timestamp": "2019-04-25T12:57:54Z"} for i in numbers
    ]
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.writelines(json.dumps(doc | {"url": "http://example.com"}) + "\n" for doc in docs)


def config(source: str, path: Path | str, seq_len: int = SEQ, local: int = 1, total: int | None = 8, **other: Any) -> Config:
    training = {"seq_len": seq_len, "local_batch_size": local, "global_batch_size": total}
    metrics = {"eval_sequences": other.pop("eval_sequences", 8), "eval_every": other.pop("eval_every", 0)}
    return Config.model_validate(
        {"data": {"source": source, "path": str(path), "val_every": 5, **other}, "training": training, "metrics": metrics}
    )


def global_batch(parts: list[Data], step: int) -> torch.Tensor:
    """All ranks' inputs and labels of one step in the order of the ranks, (2, G, T)."""
    batches = [batch for part in parts for batch in part.micro_batches(step)]
    return torch.stack([torch.cat([b.inputs for b in batches]), torch.cat([b.labels for b in batches])])


def texts(tokenizer: Tokenizer, *batches: torch.Tensor) -> str:
    """Each sequence decoded on its own, a line each."""
    return "\n".join(tokenizer.decode(row) for batch in batches for row in batch.flatten(0, -2).tolist())


@pytest.fixture(params=["python-stdlib", "c4"])
def source(request: pytest.FixtureRequest, library: Path, c4_folder: Path) -> tuple[str, Path]:
    return request.param, {"python-stdlib": library, "c4": c4_folder}[request.param]


def test_every_world_size_and_accumulation_trains_on_the_same_batches(source: tuple[str, Path], tokenizer: Tokenizer):
    expected = None
    for dp, local in ((1, 8), (1, 1), (2, 4), (2, 1), (4, 2), (8, 1)):
        parts = [build_data(config(*source, local=local), rank, dp, tokenizer) for rank in range(dp)]
        for part in parts:
            assert [batch.inputs.shape for batch in part.micro_batches(1)] == [(local, SEQ)] * (8 // dp // local)
        got = torch.stack([global_batch(parts, step) for step in (2, 3, 60)])
        expected = got if expected is None else expected
        assert torch.equal(got, expected), (dp, local)


def test_every_world_size_evaluates_the_same_sequences(source: tuple[str, Path], tokenizer: Tokenizer):
    seen = []
    for dp, local in ((1, 4), (2, 2), (4, 1)):
        parts = [build_data(config(*source, local=local), rank, dp, tokenizer) for rank in range(dp)]
        seen.append(torch.cat([batch.inputs for part in parts for batch in part.eval_batches()]))
        assert len({len(part.eval_batches()) for part in parts}) == 1
        assert torch.equal(seen[-1], torch.cat([batch.inputs for part in parts for batch in part.eval_batches()]))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert len(seen[0]) == 8


def test_evaluation_takes_full_micro_batches_and_repeats_a_short_split(library: Path, tokenizer: Tokenizer):
    few = build_data(config("python-stdlib", library, local=3, total=6, eval_sequences=10), 0, 2, tokenizer)
    assert [len(batch.inputs) for batch in few.eval_batches()] == [3]  # 10 sequences are one micro-batch of 3 on 2 ranks
    none = build_data(config("python-stdlib", library, local=64, total=64, eval_sequences=1), 0, 1, tokenizer)
    inputs, n = none.eval_batches()[0].inputs, len(none._held_out.head(1000))
    assert n < 64
    assert torch.equal(inputs, inputs[torch.arange(64) % n])


def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(source: tuple[str, Path], tokenizer: Tokenizer):
    whole = build_data(config(*source), 0, 1, tokenizer)
    steps = [global_batch([whole], step) for step in range(1, 41)]
    resumed = build_data(config(*source), 0, 1, tokenizer)
    for step in range(23, 41):
        assert torch.equal(global_batch([resumed], step), steps[step - 1])


def test_labels_are_the_next_tokens(source: tuple[str, Path], tokenizer: Tokenizer):
    for batch in build_data(config(*source, local=2), 0, 1, tokenizer).micro_batches(1):
        inputs, labels = batch.inputs, batch.labels
        assert batch.starts is None, "only told where documents are kept apart"
        assert inputs.dtype == labels.dtype == torch.int64
        assert inputs.stride() == labels.stride() == (SEQ, 1)
        assert torch.equal(inputs[:, 1:], labels[:, :-1])


def test_held_out_documents_are_not_trained_on(source: tuple[str, Path], tokenizer: Tokenizer):
    data = build_data(config(*source, local=8, eval_sequences=1000), 0, 1, tokenizer)
    train = texts(tokenizer, *(global_batch([data], step)[0] for step in range(1, 40)))
    held_out = texts(tokenizer, *(batch.inputs for batch in data.eval_batches()))
    name = "value_{} =" if source[0] == "python-stdlib" else "Document {}."
    documents = range(30) if source[0] == "python-stdlib" else range(40)
    in_train = {i for i in documents if name.format(i) in train}
    in_held_out = {i for i in documents if name.format(i) in held_out}
    assert in_train
    assert in_held_out
    assert not in_train & in_held_out


def test_c4_evaluates_on_files_of_its_validation_split(c4_folder: Path, tokenizer: Tokenizer):
    write_c4(c4_folder / "c4-validation.00000-of-00001.json", range(900, 950))
    data = build_data(config("c4", c4_folder, local=8, eval_sequences=16), 0, 1, tokenizer)
    trained = tokenizer.decode(torch.cat([global_batch([data], step)[0] for step in range(1, 20)]).flatten().tolist())
    assert all(f"Document {i}." in trained for i in range(40))
    assert "Document 9" not in trained.replace("Document 9.", "")
    assert "Document 900." in texts(tokenizer, *(batch.inputs for batch in data.eval_batches()))


def test_an_epoch_covers_everything_once_and_the_next_in_another_order(library: Path, tokenizer: Tokenizer):
    data = build_data(config("python-stdlib", library, local=1, total=1), 0, 1, tokenizer)
    n = len(data._train.sequences)
    epochs = [[tuple(data.micro_batches(e * n + i)[0].inputs[0].tolist()) for i in range(1, n + 1)] for e in range(2)]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(tuple(row[:-1].tolist()) for row in data._train.sequences)
    assert epochs[0] != epochs[1]


def test_a_step_may_span_two_epochs(library: Path, tokenizer: Tokenizer):
    one = build_data(config("python-stdlib", library, total=1), 0, 1, tokenizer)
    n = len(one._train.sequences)
    all_of_it = build_data(config("python-stdlib", library, local=n + 3, total=n + 3), 0, 1, tokenizer)
    assert torch.equal(
        all_of_it.micro_batches(1)[0].inputs, torch.cat([one.micro_batches(i)[0].inputs for i in range(1, n + 4)])
    )


def test_the_order_is_the_same_on_every_machine_and_numpy():
    assert order(0, 0, 10).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    assert sorted(order(3, 7, 1000)) == list(range(1000))


def test_the_stream_begins_again_at_its_end(c4_folder: Path, tokenizer: Tokenizer):
    data = build_data(config("c4", c4_folder, local=1, total=1), 0, 1, tokenizer)
    n = len(data._train.head(10_000))
    rows = [data.micro_batches(step)[0].inputs for step in range(1, 2 * n + 1)]
    assert torch.equal(torch.cat(rows[:n]), torch.cat(rows[n:]))


def test_a_stream_cannot_go_back(c4_folder: Path, tokenizer: Tokenizer):
    data = build_data(config("c4", c4_folder), 0, 1, tokenizer)
    data.micro_batches(2)
    with pytest.raises(AssertionError, match="cannot go back"):
        data.micro_batches(1)


def test_streamed_and_packed_documents_are_cut_alike(tokenizer: Tokenizer):
    documents = [f"number {i} " * i for i in range(40)]
    tokens = pack(documents, tokenizer)
    assert tokens.dtype == np.uint16
    packed = windows(tokens, SEQ)
    assert list(cut(map(tokenizer.encode_document, documents), SEQ)) == packed.tolist()
    assert len(packed) == (len(tokens) - 1) // SEQ
    assert packed[0, -1] == packed[1, 0]
    assert windows(tokens[:SEQ], SEQ).shape == (0, SEQ + 1)
    assert windows(tokens[: SEQ + 1], SEQ).shape == (1, SEQ + 1)


def test_documents_begin_and_end_with_their_tokens(library: Path, tokenizer: Tokenizer):
    tokens = build_data(config("python-stdlib", library), 0, 1, tokenizer)._train.sequences[:, :-1].flatten()
    assert tokens[0] == tokenizer.bos_id
    (ends,) = np.nonzero(tokens[:-1] == tokenizer.eos_id)
    assert len(ends) >= 20
    assert (tokens[ends + 1] == tokenizer.bos_id).all()


def test_every_nth_document_is_held_out():
    assert list(pick("abcdefg", 3, held_out=True)) == ["c", "f"]
    assert list(pick("abcdefg", 3, held_out=False)) == ["a", "b", "d", "e", "g"]


def test_the_fingerprint_knows_text_order_and_tokenizer(library: Path, tokenizer: Tokenizer, tmp_path: Path):
    def fingerprint(tokenizer: Tokenizer = tokenizer, **changes: Any) -> str:
        return build_data(config("python-stdlib", library, **changes), 0, 1, tokenizer).fingerprint

    first = fingerprint()
    assert first == fingerprint() == fingerprint(local=4)
    lines = Path(load.__code__.co_filename).with_name("titan.tiktoken").read_bytes().splitlines(keepends=True)
    (tmp_path / "shorter").write_bytes(b"".join(lines[:-1]))
    changed = [fingerprint(seq_len=32), fingerprint(shuffle_seed=1), fingerprint(val_every=6)]
    changed.append(fingerprint(load("titan", str(tmp_path / "shorter"))))
    (library / "m00.py").write_text("other = 1\n")
    changed.append(fingerprint())
    assert len({first, *changed}) == 6


def test_the_fingerprint_of_a_stream_knows_its_files(c4_folder: Path, tokenizer: Tokenizer):
    def fingerprint(**changes: Any) -> str:
        return build_data(config("c4", c4_folder, **changes), 0, 1, tokenizer).fingerprint

    first = fingerprint()
    assert first == fingerprint()
    changed = [fingerprint(seq_len=32), fingerprint(val_every=6)]
    write_c4(c4_folder / "more.jsonl", range(40, 45))
    assert len({first, *changed, fingerprint()}) == 4


def test_the_whole_library(tokenizer: Tokenizer):
    data = build_data(config("python-stdlib", "", seq_len=1024, local=8), 0, 1, tokenizer)
    assert len(data._train.sequences) > 1000
    assert len(data._held_out.sequences) > 50
    assert int(max(batch.inputs.max() for batch in data.micro_batches(1))) < tokenizer.vocab_size


def test_local_files_need_no_network(c4_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    import datasets

    asked: list[Any] = []
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **_: asked.append(args) or [])
    build_data(config("c4", c4_folder, eval_every=1), 0, 1, tokenizer).micro_batches(1)
    assert not asked


def test_one_file_is_a_source_too(c4_folder: Path, tokenizer: Tokenizer):
    data = build_data(config("c4", c4_folder / "c4-train.00001-of-00002.json.gz"), 0, 1, tokenizer)
    assert "Document 20." in texts(tokenizer, global_batch([data], 1)[0])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (None, b""),
        ("a.json", b"{}"),
        ("a.jsonl", b'{"body": "no text"}\n'),
        ("a.json.gz", b"not gzip"),
        ("a.jsonl", b'{"text": "short"}\n'),
    ],
)
def test_unusable_files_are_refused_before_step_1(tmp_path: Path, tokenizer: Tokenizer, name: str | None, content: bytes):
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TitanError) as error:
        build_data(config("c4", tmp_path), 0, 1, tokenizer)
    assert error.value.code == ExitCode.REFUSED
    assert error.value.hint


def test_no_network_names_both_ways_out(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # otherwise it retries for 23 s
    with pytest.raises(TitanError, match="hub") as error:
        build_data(config("c4", ""), 0, 1, tokenizer)
    assert error.value.code == ExitCode.REFUSED
    assert "data.path=" in error.value.hint
    assert "data.source=python-stdlib tokenizer.name=titan" in error.value.hint


def test_a_corpus_without_one_sequence_is_refused(library: Path, tokenizer: Tokenizer):
    with pytest.raises(TitanError, match="shorter than one sequence"):
        build_data(config("python-stdlib", library, seq_len=100_000), 0, 1, tokenizer)
    with pytest.raises(TitanError, match="held-out"):
        build_data(config("python-stdlib", library, eval_every=10, val_every=50), 0, 1, tokenizer)
