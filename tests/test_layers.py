"""Layers, origins, the lines of keys, and that every problem of every layer is told in one error."""

import dataclasses
from pathlib import Path

import pytest
import tomli

from titan_cli.config import dump, presets
from titan_cli.config.layers import Origin, load
from titan_cli.config.locate import key_lines
from titan_cli.config.options import matching, nearest, options
from titan_cli.config.schema import Config, Data, Optimizer, Training
from titan_cli.errors import TitanError


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems(**layers: object) -> str:
    with pytest.raises(TitanError) as caught:
        load(**layers)  # type: ignore[arg-type]
    assert caught.value.code == 2
    assert caught.value.hint
    return caught.value.message


# --- which layer wins -------------------------------------------------------------------------------------------------


def test_no_layers_are_the_defaults() -> None:
    loaded = load()
    assert loaded.config == Config()
    assert set(loaded.origins) == set(options())
    assert set(loaded.origins.values()) == {Origin("default")}


def test_later_layers_win_and_say_so(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", "[training]\nsteps = 1\nseed = 1\nseq_len = 1\nlocal_batch_size = 1\n")
    write(tmp_path, "b.toml", "[training]\nseed = 2\nseq_len = 2\nlocal_batch_size = 2\n")
    preset = write(tmp_path, "p.toml", 'extends = ["a.toml", "b.toml"]\n[training]\nseq_len = 3\nlocal_batch_size = 3\n')
    config = write(tmp_path, "c.toml", "training.local_batch_size = 4\n")
    loaded = load(preset, config, ["training.max_norm=5", "training.max_norm=6"])
    t = loaded.config.training
    assert (t.steps, t.seed, t.seq_len, t.local_batch_size, t.max_norm) == (1, 2, 3, 4, 6.0)
    assert loaded.origins["training.steps"] == Origin("extends", str(tmp_path / "a.toml"), 2)
    assert loaded.origins["training.seed"] == Origin("extends", str(tmp_path / "b.toml"), 2)
    assert loaded.origins["training.seq_len"] == Origin("preset", preset, 3)
    assert loaded.origins["training.local_batch_size"] == Origin("config", config, 1)
    assert loaded.origins["training.max_norm"] == Origin("command line")
    assert loaded.origins["training.dtype"] == Origin("default")


def test_parents_are_names_or_paths_relative_to_the_file(tmp_path: Path) -> None:
    write(tmp_path, "sub/base.toml", 'extends = ["llama3-debug"]\n[training]\nsteps = 7\n')
    preset = write(tmp_path, "p.toml", 'extends = ["sub/base.toml"]\n')
    loaded = load(preset)
    assert (loaded.config.training.steps, loaded.config.training.seq_len) == (7, 64)
    assert str(loaded.origins["training.seq_len"]).startswith("extends presets/llama3-debug.toml:")


def test_a_shared_grandparent_does_not_undo_a_parent(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "training.steps = 1\n")
    write(tmp_path, "a.toml", 'extends = ["base.toml"]\ntraining.steps = 2\n')
    write(tmp_path, "b.toml", 'extends = ["base.toml"]\ntraining.seed = 2\n')
    preset = write(tmp_path, "p.toml", 'extends = ["a.toml", "b.toml"]\n')
    assert load(preset).config.training.steps == 2


def test_loaded_is_frozen() -> None:
    loaded = load()
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.config = Config()  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        loaded.config.training.steps = 1  # type: ignore[misc]


def test_a_file_with_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(b"\xef\xbb\xbf[training]\r\nseed = 1\r\nsteps = 3\r\n")
    assert load(str(path)).origins["training.steps"].line == 3


# --- the command line's values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("training.steps=10", 10),
        ("training.steps=1_000", 1000),
        ("optimizer.lr=1e-3", 1e-3),
        ("optimizer.lr=1", 1.0),
        ("compile.loss=false", False),
        ("parallelism.dp_shard=-1", -1),
        ("launch.gpus_per_node=auto", "auto"),
        ('launch.gpus_per_node="auto"', "auto"),
        ("launch.gpus_per_node=8", 8),
        ("training.dtype=float32", "float32"),
        ("data.path=true", "true"),
        ("data.path=1", "1"),
        ('data.path=a = "b" # c', 'a = "b" # c'),
        ("data.path=", ""),
        ("data.path=C:\\data", "C:\\data"),
    ],
)
def test_the_type_decides_how_a_value_is_read(override: str, value: object) -> None:
    found = dump.values(load(overrides=[override]).config)[override.partition("=")[0]]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.steps=ten", "training.steps must be integer >= 1 (default 1000), not ten"),
        ("training.steps=", "training.steps must be integer >= 1"),
        ("training.steps=0", "integer >= 1 (default 1000), not 0"),
        ("training.steps=1e3", "not 1000.0"),
        ("training.steps=true", "not true"),
        ("training.steps='3'", 'not "3"'),
        ("training.steps=1\nseed=2", "must be integer >= 1"),
        ("training.steps={a=1}", "not a table"),
        ("training.steps=[1]", "not a list"),
        ("compile.loss=True", "must be true or false (default true), not True"),
        ("training.dtype=bf16", 'must be "bfloat16", "float32" or "float64"'),
        ("launch.gpus_per_node=all", 'integer >= 1 or "auto"'),
        ("parallelism.dp_shard=0", "integer >= 1 or -1"),
        ("optimizer.lr=nan", "number > 0"),
        ("optimizer.beta1=1", "number >= 0 and < 1"),
        ("data.path=\udcff", "data.path must be text"),
        ("steps=3", "unknown key steps (a key has a dot: section.key)\n    nearest: training.steps"),
        ("training.step=3", "nearest: training.steps (integer >= 1; default 1000): optimizer steps"),
        ("train.lr=3", "nearest: optimizer.lr"),
        ("training.steps", "training.steps needs a value\n    Write training.steps=VALUE"),
        ("a.b.c=1", "unknown key a.b.c"),
        ("=", "unknown key"),
    ],
)
def test_a_bad_override_says_what_to_do(override: str, said: str) -> None:
    message = problems(overrides=[override])
    assert message.startswith("command line: ")
    assert said in message


# --- problems in files ------------------------------------------------------------------------------------------------


def test_all_problems_of_all_layers_are_told_together(tmp_path: Path) -> None:
    broken = write(tmp_path, "broken.toml", "[training]\nsteps = \n")
    base = write(tmp_path, "base.toml", "[training]\nsteps = 'ten'\n\n[optimizer]\nlearning_rate = 1\n")
    preset = write(
        tmp_path, "p.toml", 'extends = [\n  "broken.toml", "base.toml", "nowhere"]\n[traning]\nx = 1\n[training]\nsteps = 3\n'
    )
    config = write(tmp_path, "c.toml", "[launch]\nnodes = 0\n")
    message = problems(preset=preset, config_file=config, overrides=["training.seed=-1", "lr=2"])
    for said in [
        f"{broken}:2: not valid TOML: Invalid value (column 9)",
        f"{preset}:1: unknown preset nowhere",
        f'{base}:2: training.steps must be integer >= 1 (default 1000), not "ten"',  # although the preset replaces it
        f"{base}:5: unknown key optimizer.learning_rate",
        f"{preset}:3: unknown section [traning]\n    nearest: [training]",
        f"{config}:2: launch.nodes must be integer >= 1 (default 1), not 0",
        "command line: unknown key lr",
        "command line: training.seed must be integer >= 0 (default 0), not -1",
    ]:
        assert said in message
    assert message.count("\n    ") == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps = 1", ":1: unknown key steps (a key has a dot: section.key)\n    nearest: training.steps"),
        ("\ntraining = 3", ":2: training must be a section, not 3"),
        ("[[training]]\nsteps = 1", ":1: training must be a section, not a list"),
        ("[training.steps]\nx = 1", ":1: training.steps must be integer >= 1 (default 1000), not a table"),
        ("[zzz]", ":1: unknown section [zzz]\n    There are model, data"),
        ('extends = "debug"', ':1: extends must be a list of text, not "debug"\n    Write extends = ["NAME"].'),
        ("extends = [1]", ":1: extends must be a list of text, not a list"),
        ('extends = ["gone.toml"]', "gone.toml: no such file"),
        ("[training]\nsteps = 1979-05-27", ":2: training.steps must be integer >= 1 (default 1000), not 1979-05-27"),
        ("[training]\nsteps = 1\nsteps = 2", ":3: not valid TOML: Cannot overwrite a value"),
    ],
)
def test_a_bad_file_says_where_and_what_to_do(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems(config_file=write(tmp_path, "c.toml", text))


def test_a_file_that_is_not_utf8_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    assert "not UTF-8 (byte 2)" in problems(preset=str(tmp_path / "latin.toml"))
    assert "cannot be read: No such file" in problems(config_file=str(tmp_path / "none.toml"))
    assert "cannot be read: Is a directory" in problems(config_file=str(tmp_path))


def test_circles_are_errors(tmp_path: Path) -> None:
    a = write(tmp_path, "a.toml", 'extends = ["b.toml"]\n')
    b = write(tmp_path, "b.toml", '# the way back\nextends = ["a.toml"]\n')
    assert f"{b}:2: extends goes in a circle: {a} -> {b} -> {a}" in problems(preset=a)
    me = write(tmp_path, "me.toml", 'extends = ["me.toml"]\n')
    assert "circle" in problems(preset=me)


def test_unknown_preset_names_the_nearest() -> None:
    assert "unknown preset llama3-debgu\n    Did you mean llama3-debug" in problems(preset="llama3-debgu")
    assert "There are: debug, " in problems(preset="zzzzzz")
    assert "no such file\n    Did you mean debug" in problems(preset="debug_.toml")


# --- the line of a key ------------------------------------------------------------------------------------------------

HARD = r'''# [not.a.table]
top.dotted . "quoted.key" = 1   # a = 2
'single "quoted"' = "x = [ {"
escaped = "\"a = 1"
literal = '\'

many = """
[no.table]
a = 1 \"""
b = "2" """
more = """two of its own: """"
lit = \'\'\'
it's = 'nothing'
\'\'\'
empty = """"""
list = [ # ]
  [1, 2], { in_list = "]", x = [ { deep = 1 } ] },
  "a = 1", # "]
]
after = 2026-01-01T00:00:00Z
[ table . "sub table" ] # [other]
inline = { a.b = 1, c = [1, { d = 2 }], e = {}, f = { g = '}' } }
num = -1.5e-3
[[array]]
x = 1
[[array]]
x = 2
y = 3
[last]
"caf\u00e9" = """x"""'''.replace("\\'\\'\\'", "'''")


def every_key(value: object, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    if isinstance(value, dict):
        return {p for k, v in value.items() for p in {(*path, k)} | every_key(v, (*path, k))}
    if isinstance(value, list):
        return {p for v in value for p in every_key(v, path)}
    return set()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_scanner_finds_the_keys_that_tomli_finds(newline: str) -> None:
    lines = key_lines(HARD.replace("\n", newline))
    assert set(lines) == every_key(tomli.loads(HARD))
    text = HARD.split("\n")
    for path, line in lines.items():
        name = "caf" if path[-1] == "café" else path[-1]
        assert name in text[line - 1], (path, line)


def test_the_scanner_gives_the_first_mention() -> None:
    lines = key_lines(HARD)
    assert lines["top", "dotted", "quoted.key"] == 2
    assert lines["array", "x"] == HARD.split("\n").index("[[array]]") + 2
    assert lines["table", "sub table", "inline", "f", "g"] == lines["table", "sub table", "inline"]
    assert lines["after",] == HARD[: HARD.index("after =")].count("\n") + 1


# --- as text and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ['"', "\\", "\n\t\r\b\f\x00\x1f\x7f\x80", "é😀\u2028", "'''", '"""', "C:\\new", " # x = 1 "])
def test_text_survives_toml(text: str) -> None:
    config = Config(data=Data(path=text))
    assert Config.model_validate(tomli.loads(dump.to_toml(config))) == config


@pytest.mark.parametrize("number", [0.1, 1e-8, 3e-324, 1.7976931348623157e308, 1e16, 1.0, 2 / 3])
def test_floats_survive_toml(number: float) -> None:
    config = Config(optimizer=Optimizer(lr=number))
    assert Config.model_validate(tomli.loads(dump.to_toml(config))) == config


def test_a_dumped_config_is_a_layer_again(tmp_path: Path) -> None:
    loaded = load("llama3-debug-2d", overrides=["training.global_batch_size=8", "model.n_layers=1"])
    path = write(tmp_path, "config.toml", dump.to_toml(loaded.config, {k: str(o) for k, o in loaded.origins.items()}))
    assert load(config_file=path).config == loaded.config


def test_unset_keys_are_left_out() -> None:
    assert "global_batch_size" not in dump.to_toml(Config())
    assert "global_batch_size = 2\n" in dump.to_toml(Config(training=Training(global_batch_size=2)))


def test_origins_as_json() -> None:
    origins = {"training.steps": Origin("config", "c.toml", 2), "training.seed": Origin("command line")}
    assert dump.origins_json(origins) == {
        "training.steps": {"layer": "config", "file": "c.toml", "line": 2},
        "training.seed": {"layer": "command line", "file": None, "line": None},
    }


# --- options ----------------------------------------------------------------------------------------------------------


def test_every_option_is_documented_and_typed() -> None:
    assert list(options()) == list(dump.values(Config()))
    for option in options().values():
        assert option.doc
        assert option.type
        assert option.default == dump.shown(dump.values(Config())[option.key])


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("training.global_batch_size", "integer >= 1"),
        ("lr_schedule.min_share", "number >= 0 and <= 1"),
        ("launch.gpus_per_node", 'integer >= 1 or "auto"'),
        ("model.tie_embeddings", "true or false"),
        ("data.path", "text"),
        ("model.attention", '"sdpa" or "flex"'),
    ],
)
def test_types_in_words(key: str, words: str) -> None:
    assert options()[key].type == words


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("training.stpes", "training.steps"),
        ("lr", "optimizer.lr"),
        ("model.lr", "optimizer.lr"),
        ("parallelism.tpp", "parallelism.tp"),
    ],
)
def test_nearest_option(typed: str, meant: str) -> None:
    option = nearest(typed)
    assert option is not None
    assert option.key == meant


def test_matching_looks_into_keys_and_documentation() -> None:
    assert [o.key for o in matching("WARMUP-steps")] == ["lr_schedule.warmup_steps"]
    assert "optimizer.lr" in [o.key for o in matching("learning rate")]
    assert len(matching("")) == len(options())


def test_shipped_presets_are_told_by_a_short_path() -> None:
    assert presets.shown(presets.find("debug")) == "presets/debug.toml"
    assert presets.shown(presets.find("debug").resolve()) == "presets/debug.toml"
    assert presets.shown(Path("x/debug.toml")) == "x/debug.toml"
