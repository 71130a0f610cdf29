"""Text to token ids and back, over tiktoken. The front asks it for `vocab_size`, so tiktoken is imported on first use."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_cli.errors import ExitCode, TitanError

SHIPPED = Path(__file__).with_name("titan.tiktoken")


@dataclass(frozen=True)
class Kind:
    """What a tiktoken file does not say: where text is split before merging, and the special tokens after the last rank.

    Of `specials`, the first begins a document and the second ends it.
    """

    split: str
    specials: tuple[str, ...]


# In source code a line's indentation repeats more than any word, so a line break and the spaces after it are one piece.
# No English contractions: 's would be cut off the front of 'self'.
TITAN = Kind(
    split="|".join(
        (
            r"[^\r\n\p{L}\p{N}]?\p{L}+",  # letters, with one sign before: " return", "_name", ".join", "(self"
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+",  # signs: "):", " ==", "__"
            r"\s*[\r\n]+[ \t]*",  # line breaks and the indentation of the next line
            r"\s+(?!\S)",  # spaces, but the last one goes with the word after them
            r"\s+",
        )
    ),
    specials=("<|begin_of_text|>", "<|end_of_text|>"),
)

# As published with Llama 3. Llama 3.1 gave some reserved tokens other names; the ids are the same.
LLAMA3 = Kind(
    split=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    specials=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        *(f"<|reserved_special_token_{i}|>" for i in range(4)),
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|reserved_special_token_4|>",
        "<|eot_id|>",
        *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
    ),
)

KINDS = {"titan": TITAN, "llama3": LLAMA3}

WITHOUT_IT = "Or the same model and layout with what titan ships: data.source=python-stdlib tokenizer.name=titan"
HINTS = {
    "titan": "It comes with titan: install titan-cli again. Your own: python -m titan_cli.tokenizer.train OUT",
    "llama3": "Meta's file (accept the licence at huggingface.co/meta-llama/Llama-3.1-8B first):\n"
    "  hf download meta-llama/Llama-3.1-8B original/tokenizer.model --local-dir llama3\n"
    "  and tokenizer.path=llama3/original/tokenizer.model\n" + WITHOUT_IT,
}

# tiktoken's matcher gives up, with a panic that no `except Exception` sees, on runs of about a million spaces, and merging
# is slow in a very long word. The bounds are those of Llama 3's reference, so that cut text gets its ids too.
PIECE_CHARS = 400_000
RUN_CHARS = 25_000  # of spaces, or of anything else
_SHORT_RUNS = re.compile(rf"(?:\s{{1,{RUN_CHARS}}}+(?!\s)|\S{{1,{RUN_CHARS}}}+(?!\S))*+")


class Tokenizer:
    """One vocabulary: mergeable ranks 0 .. n-1, then the special tokens. `identity` is equal where all ids are."""

    def __init__(self, ranks: dict[bytes, int], kind: Kind) -> None:
        import tiktoken

        specials = {token: len(ranks) + i for i, token in enumerate(kind.specials)}
        self._encoding = tiktoken.Encoding("titan", pat_str=kind.split, mergeable_ranks=ranks, special_tokens=specials)
        self.vocab_size = len(ranks) + len(specials)
        self.bos_id = len(ranks)
        self.eos_id = len(ranks) + 1
        self.identity = hashlib.sha256(repr((kind, sorted(ranks, key=ranks.__getitem__))).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of the text's bytes; never a special token, whatever the text says. A lone surrogate is read as U+FFFD."""
        return [token for piece in pieces(text) for token in self._encoding.encode_ordinary(piece)]

    def encode_document(self, text: str) -> list[int]:
        """begin_of_text, the text, end_of_text."""
        return [self.bos_id, *self.encode(text), self.eos_id]

    def decode(self, ids: Iterable[int]) -> str:
        """The text. Special tokens appear by name; bytes that are not UTF-8 (a character cut in two) as U+FFFD."""
        return self._encoding.decode(list(ids))


def pieces(text: str) -> Iterator[str]:
    """The text in pieces that tiktoken can take: at most PIECE_CHARS long, no run of one class longer than RUN_CHARS."""
    for start in range(0, len(text), PIECE_CHARS):
        part = text[start : start + PIECE_CHARS]
        cut = 0
        while cut < len(part):
            short = _SHORT_RUNS.match(part, cut)  # stops before a run that is too long, or at the end
            assert short is not None, "the pattern matches the empty string"
            end = min(short.end() + RUN_CHARS, len(part))
            yield part[cut:end]
            cut = end


def load(name: str, path: str = "") -> Tokenizer:
    """The tokenizer `name`, from `path` (unset: the file that titan ships). Raises TitanError for what cannot be used."""
    kind = _kind(name)
    return Tokenizer(_ranks(name, path), kind)


def vocab_size(name: str, path: str = "") -> int:
    """Ids in use, special tokens included: what the model's vocab_size must hold. Raises as `load`; needs no tiktoken."""
    return len(_kind(name).specials) + len(_ranks(name, path))


def _kind(name: str) -> Kind:
    if name not in KINDS:
        raise TitanError(f"tokenizer.name: no tokenizer is called {name!r}", f"Known: {', '.join(KINDS)}.")
    return KINDS[name]


def _ranks(name: str, path: str) -> dict[bytes, int]:
    """Reads tiktoken's file: a line for each token, base64 of its bytes and its rank."""
    if not path and name != "titan":
        raise TitanError(f"tokenizer.name={name} needs tokenizer.path", HINTS[name], ExitCode.REFUSED)
    file = Path(path).expanduser() if path else SHIPPED
    try:
        fields = [line.split() for line in file.read_bytes().splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in fields}
    except OSError as error:
        raise TitanError(f"tokenizer file {file}: {error.strerror}", HINTS[name], ExitCode.REFUSED) from error
    except (ValueError, binascii.Error) as error:
        raise TitanError(f"tokenizer file {file} is not tiktoken's format", HINTS[name], ExitCode.REFUSED) from error
    if sorted(ranks.values()) != list(range(len(fields))) or not all(bytes([b]) in ranks for b in range(256)):
        why = "its ranks are not 0, 1, 2 ... with all 256 single bytes among them"
        raise TitanError(f"tokenizer file {file} is damaged: {why}", HINTS[name], ExitCode.REFUSED)
    return ranks
