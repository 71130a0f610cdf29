"""Makes `titan.tiktoken`, the shipped encoding: byte-level BPE on the Python standard library's own source code.

    python -m titan_cli.tokenizer.train OUT

Pure Python, about a minute. The same interpreter writes the same file, byte for byte; the shipped one is CPython 3.11.7's.
"""

from __future__ import annotations

import base64
import heapq
import os
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from titan_cli.tokenizer.tokenizer import TITAN

VOCAB_SIZE = 4096  # 256 bytes + 3,838 merges + the special tokens; the debug model's embedding has as many rows

# Not the library's own text: its tests (a third of the bytes, mostly data), what was installed beside it, build products.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib() -> Path:
    """The folder of the running interpreter's standard library (a virtual environment's is its base interpreter's)."""
    return Path(sysconfig.get_path("stdlib"))


def python_files(root: Path) -> list[Path]:
    """Every *.py below `root` without tests and installed packages, in the order of their relative paths."""
    found = []
    for folder, names, files in os.walk(root):
        # config-* and _sysconfigdata* hold the paths of the machine that built this interpreter.
        names[:] = [n for n in names if n not in LEFT_OUT and not n.startswith("config-")]  # os.walk descends into what stays
        paths = (Path(folder, f) for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata"))
        found += [path for path in paths if path.is_file()]  # an editor's lock is a link to nothing
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read(path: Path) -> str:
    """The file's text; bytes that are not UTF-8 (a few codec sources) become U+FFFD."""
    return path.read_text(encoding="utf-8", errors="replace")


def count_words(texts: Iterable[str]) -> Counter[bytes]:
    """How often each pre-token occurs. BPE never merges across their borders, so the counts are all it needs."""
    import regex  # type: ignore[import-untyped]  # tiktoken depends on it; `re` has no \p{L}

    split = regex.compile(TITAN.split).findall
    words: Counter[str] = Counter()
    for text in texts:
        words.update(split(text))
    return Counter({word.encode(): n for word, n in words.items()})


def train(counts: Counter[bytes], size: int) -> list[bytes]:
    """The `size` mergeable tokens, in rank order: the 256 bytes, then the most frequent pair again and again.

    Equal counts are decided by the smaller pair of ranks. Ends early when no pair is left.
    """
    tokens = [bytes([b]) for b in range(256)]
    words = [list(word) for word in counts]
    count = list(counts.values())
    total: Counter[tuple[int, int]] = Counter()  # pair -> occurrences in the corpus
    where: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # pair -> words that hold it, or once did
    for i, word in enumerate(words):
        for pair in pairwise(word):
            total[pair] += count[i]
            where[pair].add(i)
    # The heap is never corrected: an entry whose count is no longer true is put back with the true one when it surfaces.
    heap = [(-n, pair) for pair, n in total.items()]
    heapq.heapify(heap)
    while heap and len(tokens) < size:
        claimed, pair = heapq.heappop(heap)
        if total[pair] != -claimed:
            if total[pair]:
                heapq.heappush(heap, (-total[pair], pair))
            continue
        new = len(tokens)
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
        change: Counter[tuple[int, int]] = Counter()
        for i in where.pop(pair):
            old = words[i]
            words[i] = merge(old, pair, new)
            for p in pairwise(old):
                change[p] -= count[i]
            for p in pairwise(words[i]):
                change[p] += count[i]
                where[p].add(i)
        for p, n in change.items():
            total[p] += n
            if n > 0:
                heapq.heappush(heap, (-total[p], p))
    return tokens


def merge(word: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """`word` with every `pair`, from the left, replaced by `new`."""
    out: list[int] = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def lines(tokens: Iterable[bytes]) -> Iterator[bytes]:
    """tiktoken's file format: base64 of the token's bytes, a space, its rank."""
    for i, token in enumerate(tokens):
        yield base64.b64encode(token) + b" %d\n" % i


def main(out: str) -> None:
    counts = count_words(map(read, python_files(stdlib())))
    tokens = train(counts, VOCAB_SIZE - len(TITAN.specials))
    Path(out).write_bytes(b"".join(lines(tokens)))
    print(f"{out}: {len(tokens)} tokens from {len(counts)} different words")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m titan_cli.tokenizer.train OUT")
    main(sys.argv[1])
