"""Text to ids and back: nothing is lost, nothing in a text is a control token, no text is too much for tiktoken."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest

from titan_cli.errors import ExitCode, TitanError
from titan_cli.tokenizer import train
from titan_cli.tokenizer.tokenizer import LLAMA3, PIECE_CHARS, RUN_CHARS, SHIPPED, Tokenizer, load, pieces, vocab_size

BYTES = [bytes([b]) for b in range(256)]


@pytest.fixture(scope="module")
def titan() -> Tokenizer:
    return load("titan")


@pytest.fixture
def llama3_file(tmp_path: Path) -> Path:
    """Meta's format with 258 ranks instead of 128,000."""
    file = tmp_path / "tokenizer.model"
    file.write_bytes(b"".join(train.lines([*BYTES, b"ab", b" ab"])))
    return file


AWKWARD = {
    "empty": "",
    "code": "def f(self):\n\n    return {'self': [x ** 2 for x in range(10)]}  # 100%\r\n\tpass\n",
    "unicode": "naïve café, Ω ≈ 3.14, مرحبا, 你好，世界, हिन्दी, e\u0301",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈👍🏽",
    "control characters": "".join(map(chr, range(32))) + "\x7f\x85\u200b\u2028\ufeff",
    "edges of the planes": "\ud7ff\ue000\uffff\U00010000\U0010ffff",
    "a very long word": "pneumono" * 5000,
    "spaces of many kinds": " \t \u00a0\u2003\u3000 \n \r\n\v\f x",
    "special tokens": "<|begin_of_text|>a<|end_of_text|><|eot_id|>",
}


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD)
def test_round_trip(titan: Tokenizer, text: str):
    assert titan.decode(titan.encode(text)) == text


def test_every_library_file_survives(titan: Tokenizer):
    for path in train.python_files(train.stdlib())[::20]:
        assert titan.decode(titan.encode(train.read(path))) == train.read(path)


def test_lone_surrogates_become_the_replacement_character(titan: Tokenizer):
    assert titan.decode(titan.encode("a\ud800b\udfffc")) == "a\ufffdb\ufffdc"


def test_half_a_character_decodes_to_the_replacement_character(titan: Tokenizer):
    assert "\ufffd" in titan.decode(titan.encode("🏳")[:1])


@pytest.mark.parametrize("name", ["titan", "llama3"])
def test_text_cannot_contain_control_tokens(name: str, llama3_file: Path):
    tokenizer = load(name, str(llama3_file) if name == "llama3" else "")
    first_special = tokenizer.bos_id
    for special in LLAMA3.specials:
        assert max(tokenizer.encode(f"x{special}y")) < first_special


def test_a_document_has_one_beginning_and_one_end(titan: Tokenizer):
    ids = titan.encode_document("x = 1<|end_of_text|>")
    assert (ids[0], ids[-1]) == (titan.bos_id, titan.eos_id)
    assert ids[1:-1] == titan.encode("x = 1<|end_of_text|>")
    assert titan.decode(ids) == "<|begin_of_text|>x = 1<|end_of_text|><|end_of_text|>"


@pytest.mark.parametrize("unit", [" ", "\n", "a", "é", "()", " \n", "\u2003"])
def test_a_megabyte_of_one_thing(titan: Tokenizer, unit: str):
    text = unit * (1_000_000 // len(unit))
    assert titan.decode(titan.encode(text)) == text


def test_normal_text_is_one_piece():
    text = train.read(Path(train.__file__)) * 10
    assert list(pieces(text)) == [text]


def test_long_text_and_long_runs_are_cut():
    assert list(map(len, pieces("ab " * PIECE_CHARS))) == [PIECE_CHARS] * 3
    assert list(pieces("ab " + "x" * (2 * RUN_CHARS + 1) + " y")) == ["ab " + "x" * RUN_CHARS, "x" * RUN_CHARS, "x y"]
    assert list(pieces("x" * RUN_CHARS + " " * RUN_CHARS)) == ["x" * RUN_CHARS + " " * RUN_CHARS]


def test_the_shipped_vocabulary(titan: Tokenizer):
    tokens = [base64.b64decode(line.split()[0]) for line in SHIPPED.read_bytes().splitlines()]
    assert len(set(tokens)) == len(tokens) == 4094
    assert tokens[:256] == BYTES
    assert (titan.vocab_size, titan.bos_id, titan.eos_id) == (4096, 4094, 4095)
    assert vocab_size("titan") == 4096


def test_a_line_break_and_its_indentation_are_one_token(titan: Tokenizer):
    assert [titan.decode([i]) for i in titan.encode("):\n        return self")] == ["):", "\n        ", "return", " self"]


def test_llama3_special_tokens_follow_the_ranks(llama3_file: Path):
    tokenizer = load("llama3", str(llama3_file))
    assert tokenizer.vocab_size == vocab_size("llama3", str(llama3_file)) == 258 + 256
    assert len(set(LLAMA3.specials)) == 256
    # Published ids 128000, 128001, 128006, 128009, 128255, from the first one on.
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 9: "eot_id", 255: "reserved_special_token_250"}
    for offset, name in named.items():
        assert tokenizer.decode([tokenizer.bos_id + offset]) == f"<|{name}|>"


def test_identity_differs_with_the_file(titan: Tokenizer, llama3_file: Path):
    assert load("titan").identity == titan.identity != load("titan", str(llama3_file)).identity


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("llama3", None),
        ("titan", b"not base64 !\n"),
        ("titan", b'{"model": {"type": "BPE"}}'),
        ("titan", b"\x0a\x0e\x0a\x05<unk>\x15\x00"),
        ("titan", b""),
        ("titan", b"YQ== 0\n"),
        ("titan", b"".join(train.lines(BYTES[:-1]))),
        ("titan", b"".join(train.lines([*BYTES, b"ab", b"ab"]))),
    ],
)
def test_a_file_that_is_missing_or_not_tiktokens(tmp_path: Path, name: str, content: bytes | None):
    file = tmp_path / "tokenizer.model"
    if content is not None:
        file.write_bytes(content)
    for use in (load, vocab_size):
        with pytest.raises(TitanError, match=r"tokenizer\.model") as error:
            use(name, str(file))
        assert error.value.code == ExitCode.REFUSED
        assert error.value.hint


def test_llama3_without_a_path_names_both_ways_out():
    with pytest.raises(TitanError) as error:
        vocab_size("llama3")
    assert error.value.code == ExitCode.REFUSED
    assert "tokenizer.path=" in error.value.hint
    assert "data.source=python-stdlib tokenizer.name=titan" in error.value.hint


def test_an_unknown_name_is_a_usage_error():
    with pytest.raises(TitanError, match="gpt2") as error:
        load("gpt2")
    assert error.value.code == ExitCode.USAGE


def test_the_front_can_ask_for_the_size_without_tiktoken():
    code = "import sys; from titan_cli.tokenizer import tokenizer as t; t.vocab_size('titan'); print('tiktoken' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


TINY = ["the cat sat on the mat\n", "the rat sat\n    that cat\n" * 3, "aaaa aaaa aaa\n"]


def test_training_is_deterministic_and_makes_a_valid_encoding(tmp_path: Path):
    files = []
    for attempt, texts in enumerate((TINY, TINY, TINY[::-1])):  # counts alone matter, not the order of the texts
        files.append(tmp_path / f"{attempt}.tiktoken")
        files[-1].write_bytes(b"".join(train.lines(train.train(train.count_words(texts), 270))))
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    tokenizer = load("titan", str(files[0]))
    assert tokenizer.vocab_size == 272
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TINY] == TINY
    assert len(tokenizer.encode(" cat")) == 1


def test_training_merges_the_most_frequent_pair_first():
    assert train.train(train.Counter({b"ab": 3, b"bc": 5, b"bcd": 1}), 258)[256:] == [b"bc", b"ab"]


def test_training_ends_when_no_pair_is_left():
    assert train.train(train.Counter({b"aaa": 2}), 300)[256:] == [b"aa", b"aaa"]


def test_tests_and_installed_packages_are_not_the_library(tmp_path: Path):
    keep = ["a.py", "b/c.py", "b.py", "b/testing.py"]
    drop = ["test/a.py", "b/tests/a.py", "site-packages/x/a.py", "dist-packages/a.py", "idlelib/idle_test/a.py", "b/a.txt"]
    drop += ["b/__pycache__/a.py", "config-3.11-x86_64/python-config.py", "_sysconfigdata__linux.py"]
    for name in keep + drop:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [p.relative_to(tmp_path).as_posix() for p in train.python_files(tmp_path)] == sorted(keep)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the shipped encoding is made from CPython 3.11.7's library")
def test_the_shipped_file_can_be_made_again(tmp_path: Path):
    out = tmp_path / "titan.tiktoken"
    subprocess.run([sys.executable, "-m", "titan_cli.tokenizer.train", str(out)], check=True)
    assert out.read_bytes() == SHIPPED.read_bytes()
