"""argv: what is torchrun's, and how a key is written. Lists in, lists out."""

import pytest

from titan_cli.config.argv import normalise, split
from titan_cli.errors import TitanError


@pytest.mark.parametrize(
    ("argv", "ours", "torchrun"),
    [
        (["train", "a.b=1"], ["train", "a.b=1"], []),
        (["train", "--", "--nproc", "2"], ["train"], ["--nproc", "2"]),
        (["train", "--", "--log-dir", "--", "x"], ["train"], ["--log-dir", "--", "x"]),
        (["--", "x"], [], ["x"]),
        (["train", "--"], ["train"], []),
        ([], [], []),
    ],
)
def test_split_at_the_first_lone_dashes(argv: list[str], ours: list[str], torchrun: list[str]) -> None:
    assert split(argv) == (ours, torchrun)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--training.steps", "10"], ["training.steps=10"]),
        (["--training.steps=10"], ["training.steps=10"]),
        (["training.steps=10"], ["training.steps=10"]),
        (["--lr-schedule.warmup-steps=1"], ["lr_schedule.warmup_steps=1"]),
        (["lr-schedule.warmup-steps=1"], ["lr_schedule.warmup_steps=1"]),
        (["--data.path", "my-file_1.gz"], ["data.path=my-file_1.gz"]),
        (["--data.path=a=b.c-d"], ["data.path=a=b.c-d"]),
        (["--data.path="], ["data.path="]),
        (["--data.path", ""], ["data.path="]),
        (["--data.path", "-"], ["data.path=-"]),
        (["--data.path", "two\nlines"], ["data.path=two\nlines"]),
        (["--parallelism.dp-shard", "-1", "a.b=2"], ["parallelism.dp_shard=-1", "a.b=2"]),
        (["--optimizer.lr", "-.5"], ["optimizer.lr=-.5"]),
        (["--optimizer.lr", "-1e-3"], ["optimizer.lr=-1e-3"]),
        (["--optimizer.lr", "-inf"], ["optimizer.lr=-inf"]),
    ],
)
def test_three_spellings_of_an_override(argv: list[str], expected: list[str]) -> None:
    assert normalise(argv) == expected


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--preset", "my-preset", "--dry-run", "-h"],
        ["--config", "my-file.toml", "--config=my-file.toml"],
        ["--preset", "./pre-sets/a-b.toml"],
        ["--unknown-option", "1"],
        ["steps-x=10"],
        ["-5", "-x.y=1"],
    ],
)
def test_words_without_a_key_pass_untouched(argv: list[str]) -> None:
    assert normalise(argv) == argv


@pytest.mark.parametrize("following", [[], ["--json"], ["--training.seed=1"], ["-h"], ["training.seed=1"], ["-infinite"]])
def test_a_key_without_a_value_is_named(following: list[str]) -> None:
    with pytest.raises(TitanError) as caught:
        normalise(["show", "--training.max-norm", *following])
    assert "training.max_norm needs a value" in caught.value.message
    assert "training.max_norm=VALUE" in caught.value.hint
    assert caught.value.code == 2


def test_normalise_twice_is_normalise_once() -> None:
    once = normalise(["--a.b", "1", "c-d.e-f=2", "--dry-run"])
    assert normalise(once) == once


def test_the_argument_is_not_changed() -> None:
    argv = ["--a.b", "1"]
    normalise(argv)
    assert argv == ["--a.b", "1"]
