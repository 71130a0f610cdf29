"""Text to batches: which tokens step k trains on. The same for every number of ranks and any gradient accumulation.

Documents are packed back to back and cut into sequences; the sequences of the whole run are numbered 0, 1, 2 ... Step k
takes the G sequences from (k - 1) x G on, and every rank its contiguous part of them. So a position in the data is one
integer, and a resumed run needs to know nothing but its step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from titan_cli.config import imports, schema
from titan_cli.errors import ExitCode, TitanError
from titan_cli.tokenizer.tokenizer import WITHOUT_IT, Tokenizer
from titan_cli.tokenizer.train import python_files, read, stdlib

T = TypeVar("T")
Texts = Callable[[], Iterator[str]]  # documents, from the first one at every call


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. A label is its input's next token.

    `length` is that of the whole sequence, of which these may be a part, with `positions` in it.
    """

    inputs: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64
    starts: Tensor | None = None  # (B, T) int64: where the document of each input begins; None: they are one text
    positions: Tensor | None = None  # (T,) int64
    length: int | None = None

    def where(self) -> dict[str, Any]:
        """What the model must be told besides its inputs, by the names of its arguments."""
        known = {"starts": self.starts, "positions": self.positions, "length": self.length}
        return {name: value for name, value in known.items() if value is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with every tensor changed."""
        changed: dict[str, Any] = {
            f.name: function(value) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **changed)


OWN_HINT = "It is called as function(held_out) and yields text, the same at every call: see docs/add-a-model.md."
C4_HINT = "Local copies of its files, read without a network: data.path=FOLDER\n" + WITHOUT_IT


class Packed:
    """Sequences of a corpus that fits in memory, in a new order for every epoch."""

    def __init__(self, tokens: np.ndarray, seq_len: int, seed: int) -> None:
        self.sequences = windows(tokens, seq_len)
        self.seed = seed

    def rows(self, first: int, last: int) -> np.ndarray:
        """Sequences first .. last - 1 of the run, (last - first, seq_len + 1)."""
        n = len(self.sequences)
        return self.sequences[[order(self.seed, i // n, n)[i % n] for i in range(first, last)]]

    def head(self, n: int) -> np.ndarray:
        """The first n sequences of the first epoch, or all if there are fewer."""
        return self.rows(0, min(n, len(self.sequences)))


class Stream:
    """Sequences in the order of their documents, which are read forwards only; the end begins the next epoch.

    Every rank reads and encodes the whole stream and keeps its part, and a resumed run reads again all it has seen before
    its first step: both at the speed of one core, some 3 million tokens a second.
    """

    def __init__(self, texts: Texts, seq_len: int, tokenizer: Tokenizer) -> None:
        self.once = lambda: cut(map(tokenizer.encode_document, texts()), seq_len)  # one epoch, from its beginning
        self.sequences = chain.from_iterable(iter(self.once, None))  # epoch after epoch
        self.next = 0

    def rows(self, first: int, last: int) -> np.ndarray:
        """Sequences first .. last - 1 of the run, (last - first, seq_len + 1); those before them are skipped."""
        skip = first - self.next
        assert skip >= 0, f"sequence {first} asked for after {self.next - 1}: a stream cannot go back"
        self.next = last
        return np.array(list(islice(self.sequences, skip, skip + last - first)))

    def head(self, n: int) -> np.ndarray:
        """The first n sequences, or all if there are fewer; read anew, whatever `rows` has read."""
        return np.array(list(islice(self.once(), n)))


class Data:
    """What the training loop reads: one rank's part of every step, and of the evaluation.

    `fingerprint` is equal where all sequences and their order are: ranks compare theirs, and a resumed run its former one.
    """

    def __init__(
        self,
        train: Packed | Stream,
        held_out: Packed | Stream,
        fingerprint: str,
        config: schema.Config,
        dp_rank: int,
        dp_size: int,
        begin_id: int,
        eval_micro_batches: int,
    ) -> None:
        self.fingerprint = fingerprint
        self.begin_id = begin_id if config.model.attention == "flex" else None
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.local_batch_size = config.training.local_batch_size
        self.global_batch_size = config.training.global_batch_size or self.local_batch_size * dp_size
        self.eval_sequences = config.metrics.eval_sequences
        self.unit = self.local_batch_size * dp_size  # sequences of one micro-batch on every rank
        assert self.global_batch_size % self.unit == 0, f"{self.global_batch_size} sequences a step, not n x {self.unit}"
        self.eval_unit = self.unit * eval_micro_batches
        self._train, self._held_out = train, held_out
        self._last: tuple[int, list[Batch]] | None = None

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of `step` (the first is 1). From a stream, later steps only: it cannot go back.

        The last step's are kept, so that they can be asked for again.
        """
        if self._last is None or self._last[0] != step:
            self._last = (step, self._read(step))
        return self._last[1]

    def _read(self, step: int) -> list[Batch]:
        part = self.global_batch_size // self.dp_size
        first = (step - 1) * self.global_batch_size + self.dp_rank * part
        return self._batches(self._train.rows(first, first + part))

    def eval_batches(self) -> list[Batch]:
        """This rank's part of the evaluation: the same sequences every time, as many on every rank."""
        part = len(self._eval_rows) // self.dp_size
        return self._batches(self._eval_rows[self.dp_rank * part :][:part])

    @cached_property
    def _eval_rows(self) -> np.ndarray:
        """The first `eval_sequences` of the held-out split, rounded down to full micro-batches on every rank, at
        least one (in a pipeline a round of them).

        A split that is too short for that is repeated.
        """
        rows = self._held_out.head(max(self.eval_sequences, self.eval_unit))
        if not len(rows):
            raise too_short("the held-out split", "hold out more: data.val_every, or what a source of your own gives")
        return rows[np.arange(max(len(rows) // self.eval_unit, 1) * self.eval_unit) % len(rows)]

    def _batches(self, rows: np.ndarray) -> list[Batch]:
        # Both are new arrays, not views of one: compiled code is specialised on strides, also those of a batch of one.
        inputs, labels = (torch.from_numpy(part.astype(np.int64, order="C")) for part in (rows[:, :-1], rows[:, 1:]))
        size, starts = self.local_batch_size, None if self.begin_id is None else document_starts(inputs, self.begin_id)
        parts = (inputs.split(size), labels.split(size), repeat(None) if starts is None else starts.split(size))
        return [Batch(*part) for part in zip(*parts, strict=False)]  # None is repeated without end


def build_data(config: schema.Config, dp_rank: int, dp_size: int, tokenizer: Tokenizer, eval_micro_batches: int = 1) -> Data:
    """The data of one data-parallel rank; evaluation takes a multiple of `eval_micro_batches`.

    Raises TitanError for data that is missing, unreadable or too short.
    """
    source = {"python-stdlib": python_stdlib, "c4": c4}.get(config.data.source, own)
    train, held_out, fingerprint = source(config.data, config.training.seq_len, tokenizer)
    if not len(train.head(1)):
        raise too_short(f"data.source={config.data.source}", "give it more text" if source is own else "name more in data.path")
    data = Data(train, held_out, fingerprint, config, dp_rank, dp_size, tokenizer.bos_id, eval_micro_batches)
    if config.metrics.eval_every:
        data.eval_batches()  # a missing split is an error now, not after the first 500 steps
    return data


Source = tuple[Packed | Stream, Packed | Stream, str]  # training, held out, fingerprint


def python_stdlib(data: schema.Data, seq_len: int, tokenizer: Tokenizer) -> Source:
    """The Python files of this interpreter's standard library, or below `data.path`; every val_every-th is held out."""
    files = python_files(Path(data.path).expanduser() if data.path else stdlib())
    train, held_out = (pack(map(read, pick(files, data.val_every, held)), tokenizer) for held in (False, True))
    known = digest(train.tobytes(), held_out.tobytes(), seq_len, data.shuffle_seed, tokenizer.identity)
    # The held-out order has its own seed: runs that shuffle differently are evaluated on the same sequences.
    return Packed(train, seq_len, data.shuffle_seed), Packed(held_out, seq_len, seed=0), known


def c4(data: schema.Data, seq_len: int, tokenizer: Tokenizer) -> Source:
    """allenai/c4, English, in its published order (which is shuffled); or files of its format at `data.path`."""
    files = c4_files(Path(data.path).expanduser()) if data.path else []
    train, held_out = (Stream(partial(c4_split, data, files, held), seq_len, tokenizer) for held in (False, True))
    names = [f"{file.name} {file.stat().st_size}" for file in files]
    return train, held_out, digest(*names, data.val_every, seq_len, tokenizer.identity)


def c4_split(data: schema.Data, files: list[Path], held_out: bool) -> Iterator[str]:
    """c4's own splits; of local files, those with `validation` in their names (as on the hub) and the others.

    Where local files are of one split only, every val_every-th document is held out.
    """
    own = [file for file in files if ("validation" in file.name) == held_out]
    if files and own in ([], files):
        return pick(c4_texts(files, ""), data.val_every, held_out)
    return c4_texts(own, "validation" if held_out else "train")


def c4_files(path: Path) -> list[Path]:
    """The file at `path`, or the files of c4's format in that folder, by name."""
    names = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
    files = [path] if path.is_file() else sorted(file for file in path.glob("*") if file.name.endswith(names))
    if not files:
        raise TitanError(f"data.path={path} has no .json.gz, .jsonl or .json file", C4_HINT, ExitCode.REFUSED)
    return files


def c4_texts(files: list[Path], split: str) -> Iterator[str]:
    """The documents of local files ({"text": ...} on each line), or without files those of a split on the hub."""
    import datasets  # takes a second or two

    try:
        if files:
            datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # or it tells the hub, which may not be reachable, of each load
            rows = datasets.load_dataset("json", data_files=list(map(str, files)), split="train", streaming=True)
        else:
            rows = datasets.load_dataset("allenai/c4", "en", split=split, streaming=True)
        for row in rows:
            yield row["text"]
    except Exception as error:  # datasets, fsspec, pyarrow and the HTTP client each raise their own
        where = files[0].parent if files else "the Hugging Face hub"
        why = f"c4 cannot be read from {where}: {type(error).__name__}: {error}"
        raise TitanError(why, C4_HINT, ExitCode.REFUSED) from error


HEAD = 8  # sequences of either split that the fingerprint of a user's own source knows


def own(data: schema.Data, seq_len: int, tokenizer: Tokenizer) -> Source:
    """A user's own function, "package.module:function": given `held_out`, it yields the documents of that split.

    A Stream, as it may yield more than memory holds, or without end; so they are trained on in the order they come in, and
    shuffling them is its part. It is called again for every epoch and by every rank, and must begin anew and yield the same:
    that is looked at for the first HEAD sequences, which the fingerprint also knows. A change behind them goes unseen.
    """
    module, _, name = data.source.partition(":")
    function = getattr(imports.load(module), name, None)
    if not callable(function):
        raise TitanError(f"data.source={data.source}: {module} has no function {name}", OWN_HINT, ExitCode.REFUSED)
    train, held_out = (Stream(partial(own_texts, data.source, function, held), seq_len, tokenizer) for held in (False, True))
    first, again = ([split.head(HEAD).tobytes() for split in (train, held_out)] for _ in range(2))
    if first != again:
        raise TitanError(f"data.source={data.source} yields other documents the second time", OWN_HINT, ExitCode.REFUSED)
    return train, held_out, digest(data.source, *first, seq_len, tokenizer.identity)


def own_texts(source: str, function: Callable[[bool], object], held_out: bool) -> Iterator[str]:
    """What a user's function yields. Raises what it raises, and TitanError if that is not text after text."""
    documents = function(held_out)
    if isinstance(documents, str) or not isinstance(documents, Iterable):  # of a text it would be the letters
        raise TitanError(
            f"data.source={source} gives one {type(documents).__name__}, not documents", OWN_HINT, ExitCode.REFUSED
        )
    for document in documents:
        if not isinstance(document, str):
            kind = type(document).__name__
            raise TitanError(f"data.source={source} yields a {kind} for a document, not text", OWN_HINT, ExitCode.REFUSED)
        yield document


def pick(documents: Iterable[T], every: int, held_out: bool) -> Iterator[T]:
    """Every `every`-th document, or all the others. By document, so that no text is in both."""
    return (document for i, document in enumerate(documents, 1) if (i % every == 0) == held_out)


def pack(texts: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    """All documents back to back, (tokens,); in the smallest type that holds the vocabulary."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    return np.fromiter(chain.from_iterable(map(tokenizer.encode_document, texts)), dtype)


def document_starts(inputs: Tensor, begin_id: int) -> Tensor:
    """Position of the last document's beginning at or before each token, 0 if it lies before the sequence. (B, T), both."""
    here = torch.where(inputs == begin_id, torch.arange(inputs.shape[1]), 0)
    return here.cummax(dim=1).values


def windows(tokens: np.ndarray, seq_len: int) -> np.ndarray:
    """A view, (n, seq_len + 1): a sequence begins with the last token of the one before. The remainder is dropped."""
    if len(tokens) <= seq_len:
        return tokens[:0].reshape(0, seq_len + 1)
    return sliding_window_view(tokens, seq_len + 1)[::seq_len]


def cut(documents: Iterable[list[int]], seq_len: int) -> Iterator[list[int]]:
    """`windows` of the packed documents, for documents that arrive one by one."""
    rest: list[int] = []
    for ids in documents:
        rest += ids
        while len(rest) > seq_len:
            yield rest[: seq_len + 1]
            del rest[:seq_len]


@lru_cache(maxsize=2)  # a step may end one epoch and begin the next
def order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The epoch's permutation of n sequences. From raw bits, as numpy keeps those for ever, unlike `permutation` (NEP 19)."""
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(n), kind="stable")


def digest(*parts: bytes | int | str) -> str:
    """One hash of them all, in hexadecimal. Each goes in by its own hash: "a", "bc" is not "ab", "c"."""
    each = (hashlib.sha256(p if isinstance(p, bytes) else str(p).encode()).digest() for p in parts)
    return hashlib.sha256(b"".join(each)).hexdigest()


def too_short(what: str, cure: str) -> TitanError:
    """Not one sequence."""
    return TitanError(f"{what} is shorter than one sequence", f"Lower training.seq_len, or {cure}.", ExitCode.REFUSED)
