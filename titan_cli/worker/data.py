"""Text to batches: which tokens step k trains on. The same for every number of ranks and any gradient accumulation.

Documents are packed back to back and cut into sequences; the sequences of the whole run are numbered 0, 1, 2 ... Step k
takes the G sequences from (k - 1) x G on, and every rank its contiguous part of them. So a position in the data is one
integer, and a resumed run needs to know nothing but its step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from titan_cli.config import schema
from titan_cli.errors import ExitCode, TitanError
from titan_cli.tokenizer.tokenizer import WITHOUT_IT, Tokenizer
from titan_cli.tokenizer.train import python_files, read, stdlib

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]  # inputs and labels, (B, T) int64 each; a label is its input's next token
Texts = Callable[[], Iterator[str]]  # documents, from the first one at every call

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
    ) -> None:
        self.fingerprint = fingerprint
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.local_batch_size = config.training.local_batch_size
        self.global_batch_size = config.training.global_batch_size or self.local_batch_size * dp_size
        self.eval_sequences = config.metrics.eval_sequences
        self.unit = self.local_batch_size * dp_size  # sequences of one micro-batch on every rank
        assert self.global_batch_size % self.unit == 0, f"{self.global_batch_size} sequences a step, not n x {self.unit}"
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
        """The first `eval_sequences` of the held-out split, rounded down to full micro-batches on every rank, at least one.

        A split that is too short for that one is repeated.
        """
        rows = self._held_out.head(max(self.eval_sequences, self.unit))
        if not len(rows):
            raise too_short("the held-out split", "data.val_every")
        return rows[np.arange(max(len(rows) // self.unit, 1) * self.unit) % len(rows)]

    def _batches(self, rows: np.ndarray) -> list[Batch]:
        # Both are new arrays, not views of one: compiled code is specialised on strides, also those of a batch of one.
        inputs, labels = (torch.from_numpy(part.astype(np.int64, order="C")) for part in (rows[:, :-1], rows[:, 1:]))
        return list(zip(inputs.split(self.local_batch_size), labels.split(self.local_batch_size), strict=True))


def build_data(config: schema.Config, dp_rank: int, dp_size: int, tokenizer: Tokenizer) -> Data:
    """The data of one data-parallel rank. Raises TitanError for data that is missing, unreadable or too short."""
    source = {"python-stdlib": python_stdlib, "c4": c4}[config.data.source]
    train, held_out, fingerprint = source(config.data, config.training.seq_len, tokenizer)
    if not len(train.head(1)):
        raise too_short(f"data.source={config.data.source}", "name more text in data.path")
    data = Data(train, held_out, fingerprint, config, dp_rank, dp_size)
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


def pick(documents: Iterable[T], every: int, held_out: bool) -> Iterator[T]:
    """Every `every`-th document, or all the others. By document, so that no text is in both."""
    return (document for i, document in enumerate(documents, 1) if (i % every == 0) == held_out)


def pack(texts: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    """All documents back to back, (tokens,); in the smallest type that holds the vocabulary."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    return np.fromiter(chain.from_iterable(map(tokenizer.encode_document, texts)), dtype)


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
