"""The commands: parse, call one library function, render, exit code.

Libraries are imported by the command that uses them: `--help` waits for none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from titan_cli import __version__
from titan_cli.config import argv as command_line
from titan_cli.errors import ExitCode, TitanError

if TYPE_CHECKING:
    from titan_cli.config.options import Option
    from titan_cli.dashboard.screen import Screen
    from titan_cli.launch.process import Ending
    from titan_cli.plan.explain import Line
    from titan_cli.plan.target import Target
    from titan_cli.runs.folder import RunFolder

# No rich markup: brackets in help texts are meant as written, and plain help comes 60 ms sooner.
_STYLE: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
app = typer.Typer(
    help="Train LLMs with native PyTorch, and know that torch.compile did what you think.",
    epilog="Any option of a run is set as section.key=value: `titan options` lists them.",
    context_settings={"help_option_names": ["-h", "--help"]},
    **_STYLE,
)
presets_app = typer.Typer(help="List, show, copy and compare presets.", **_STYLE)
app.add_typer(presets_app, name="presets")

# The commands that hand what follows `--` to torchrun; every other one refuses it.
TAKES_TORCHRUN_ARGS = ("train",)


class Typed(NamedTuple):
    """The command line as it was typed, before and after the lone `--`."""

    ours: Sequence[str]
    torchrun_args: Sequence[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name); the process's exit code. Prints errors, raises none."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with the stream closed: `titan ... >&-`
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    try:
        ours, torchrun_args = command_line.split(sys.argv[1:] if argv is None else argv)
        if torchrun_args and ours[:1] and ours[0] not in TAKES_TORCHRUN_ARGS:
            raise TitanError(f"titan {ours[0]} takes nothing after --", hint="Only `titan train` hands arguments to torchrun.")
        typed = Typed(ours, torchrun_args)
        code = app(command_line.normalise(ours), prog_name="titan", obj=typed, standalone_mode=False)
        sys.stdout.flush()
    except TitanError as error:
        return _complain(error)
    except BrokenPipeError:  # `titan options | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at its end
        return ExitCode.UNEXPECTED
    except SystemExit as end:  # shell completion
        return end.code if isinstance(end.code, int) else ExitCode.UNEXPECTED
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except Exception as error:
        # typer's usage errors know their text; their class has another name in each of its versions.
        return _complain(_usage(error)) if hasattr(error, "format_message") else _unexpected(error)
    return code if isinstance(code, int) else ExitCode.DONE


AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options set over the preset's.")]
ConfigFile = Annotated[str | None, typer.Option("--config", metavar="FILE", help="TOML file between preset and command line.")]


def _preset_names() -> list[str]:
    from titan_cli.config import presets

    return presets.names()


PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset", metavar="NAME|FILE", help="A shipped preset, or a path that ends in .toml.", autocompletion=_preset_names
    ),
]
Preset = Annotated[
    str, typer.Argument(metavar="NAME", help="A shipped preset, or a path that ends in .toml.", autocompletion=_preset_names)
]


@app.command()
def train(
    ctx: typer.Context,
    overrides: Overrides = None,
    preset: PresetOption = None,
    config: ConfigFile = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Start this run, or continue it if it exists.")
    ] = None,
    fork: Annotated[
        str | None, typer.Option("--fork", metavar="RUN[@STEP]", help="Begin from another run's checkpoint.")
    ] = None,
    check_gradients: Annotated[
        bool, typer.Option("--check-gradients", help="Before step 1, compare every gradient of a short batch with eager.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print configuration, plan, command and environment; start nothing.")
    ] = False,
) -> int:
    """Resolve, check, plan, start torchrun workers and watch them. The same line continues a run that stopped.

    What follows a lone `--` goes to torchrun.
    """
    from titan_cli.launch import start

    chosen = [*(overrides or ()), *(["compile.check_gradients=true"] if check_gradients else [])]
    request = start.Request(ctx.obj.ours, preset, config, chosen, run, fork, ctx.obj.torchrun_args)
    if dry_run:
        print(start.dry_run(request), end="")
        return ExitCode.DONE
    ending = start.start(request, _screen)
    _show_ending(ending)
    return ending.code


@app.command()
def explain_compile(
    overrides: Overrides = None,
    preset: PresetOption = None,
    config: ConfigFile = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Explain this run's configuration.")] = None,
    torch: Annotated[str | None, typer.Option("--torch", metavar="VERSION", help="Plan for another torch.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Plan for another device (launch.gpu).")] = None,
    without: Annotated[str, typer.Option("--without", metavar="RULE", help="Plan as if this rule did not exist.")] = "",
    rule: Annotated[str | None, typer.Option("--rule", metavar="RULE", help="Print this rule's page.")] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List all rules.")] = False,
    as_json: AsJson = False,
) -> int:
    """Print what torch.compile would wrap, why, and what was rejected. Starts nothing and needs no GPU.

    Without a preset: one line for each.
    """
    from titan_cli.plan import explain
    from titan_cli.plan.planner import Refused

    if rules:
        rows = [(name, verdict, first) for name, verdict, first in explain.rule_list()]
        if as_json:
            _print_json({"rules": [{"rule": n, "verdict": v, "summary": s} for n, v, s in rows]})
        else:
            _print_table(rows, head=["rule", "does", "because"])
        return ExitCode.DONE
    for name in filter(None, (rule, without)):
        explain.known_rule(name)
    if rule:
        _print_lines(explain.page(rule, _width()))
        return ExitCode.DONE
    more = [*(overrides or ()), *([f"launch.gpu={gpu}"] if gpu else [])]
    if preset is None and config is None and run is None:
        _print_plans(more, torch, without, as_json)
        return ExitCode.DONE
    try:
        target = explain.target(preset, config, more, run, torch, without)
    except Refused as refused:
        if as_json:
            _print_json(refused.to_json())
        raise
    if as_json:
        _print_json(target.plan.to_json())
    else:
        _print_lines(explain.explain(target, _width()))
    return ExitCode.DONE


@app.callback(invoke_without_command=True)
def _root(ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"titan {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit(ExitCode.USAGE)


@presets_app.command("ls")
def presets_ls(as_json: AsJson = False) -> None:
    """One line for each shipped preset: name, hardware, layout."""
    from titan_cli.config import derive, layers, presets

    rows = [
        {"name": name, "hardware": presets.hardware(presets.find(name)), "layout": derive.layout(layers.load(name).config)}
        for name in presets.names()
    ]
    if as_json:
        _print_json({"presets": rows})
    else:
        _print_table([list(row.values()) for row in rows], head=["preset", "hardware", "layout"])


@presets_app.command("show")
def presets_show(
    name: Preset,
    overrides: Overrides = None,
    config: ConfigFile = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say behind each value which layer set it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Every value of a preset as TOML that can be loaded again, defaults included."""
    from titan_cli.config import dump, layers

    loaded = layers.load(name, config, overrides or ())
    if as_json:
        _print_json({"config": loaded.config.model_dump(), "origins": dump.origins_json(loaded.origins)})
    else:
        comments = {key: str(o) for key, o in loaded.origins.items()} if origin else {}
        print(dump.to_toml(loaded.config, comments), end="")


@presets_app.command("cp")
def presets_cp(
    name: Preset,
    dest: Annotated[Path | None, typer.Argument(metavar="DEST", help="File or folder; here by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Copy a preset's text, comments included, to start your own from."""
    from titan_cli.config import presets

    copy = presets.copy(name, dest or Path())
    if as_json:
        _print_json({"preset": name, "path": str(copy)})
    else:
        print(copy)


@presets_app.command("diff")
def presets_diff(a: Preset, b: Preset, as_json: AsJson = False) -> None:
    """The values in which two presets differ."""
    from titan_cli.config import dump, layers

    left, right = (dump.values(layers.load(name).config) for name in (a, b))
    rows = [(key, left[key], right[key]) for key in left if left[key] != right[key]]
    if as_json:
        _print_json({"a": a, "b": b, "differences": [{"key": key, "a": x, "b": y} for key, x, y in rows]})
    elif rows:
        _print_table([[key, dump.shown(x), dump.shown(y)] for key, x, y in rows], head=["key", a, b])
    else:
        _say("no difference")


@app.command()
def options(
    pattern: Annotated[str | None, typer.Argument(metavar="PATTERN", help="Part of a key or of its documentation.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole configuration's JSON schema on stdout.")] = False,
) -> None:
    """Every option of a run: key, type, default, meaning."""
    from titan_cli.config.options import matching, nearest
    from titan_cli.config.schema import Config

    if as_json:
        if pattern is not None:
            raise TitanError("--json prints the whole schema; it takes no PATTERN", hint="Leave one of the two out.")
        _print_json(Config.model_json_schema())
        return
    found = matching(pattern or "")
    if not found:
        near = nearest(pattern or "")
        raise TitanError(f"no option matches {pattern}", hint=f"nearest: {near}" if near else "`titan options` lists all.")
    if sys.stdout.isatty():
        _print_table(_by_section(found), head=["key", "type, default", "meaning"])
    else:
        _print_table([[o.key, o.type, o.default, o.doc] for o in found], head=[])


def _by_section(found: list[Option]) -> list[list[str]]:
    """Under each section's name its keys, as in the file; default below type leaves 80 columns room for the meaning."""
    rows, section = [], ""
    for option in found:
        heading, _, name = option.key.partition(".")
        if heading != section:
            section = heading
            rows.append([f"[{section}]", "", ""])
        rows.append([f"  {name}", f"{option.type}\ndefault {option.default}", option.doc])
    return rows


def _screen(target: Target, run: RunFolder, attempt: int, step: int) -> Screen:
    """The dashboard on stderr, or plain lines there."""
    from titan_cli.dashboard.screen import Screen, use_tty
    from titan_cli.dashboard.state import State

    state = State(
        run.name, target.name, target.plan.sentence(), target.config.training.steps, time.time(), attempt=attempt, step=step
    )
    return Screen.open(state, use_tty(sys.stderr, os.environ))


def _show_ending(ending: Ending) -> None:
    """One panel for a failure, one line for everything else."""
    if ending.code in (ExitCode.DONE, ExitCode.STOPPED, ExitCode.INTERRUPTED, ExitCode.STOPPED_WITH_LOSS):
        return _say(f"{ending.message}{'; ' + ending.hint if ending.hint else ''}")
    from titan_cli.dashboard.panel import failure
    from titan_cli.dashboard.screen import use_tty

    at = f"{ending.step}, {ending.phase}" if ending.phase else ending.step
    rows = [("exit", int(ending.code)), ("rank", ending.rank), ("step", at), ("line", ending.where), ("log", ending.log)]
    panel = failure(ending.message, rows, ending.hint)
    if use_tty(sys.stderr, os.environ):
        from rich.console import Console

        return Console(stderr=True).print(panel)
    return _say(str(panel))


def _print_plans(overrides: Sequence[str], torch: str | None, without: str, as_json: bool) -> None:
    """One line for each preset: hardware, layout, strategy, and the rules that decided."""
    from titan_cli.config import derive, layers, presets
    from titan_cli.plan import explain
    from titan_cli.plan.planner import Refused

    rows = []
    for name in presets.names():
        row = {
            "preset": name,
            "hardware": presets.hardware(presets.find(name)),
            "layout": derive.layout(layers.load(name).config),
        }
        try:
            target = explain.target(name, None, overrides, None, torch, without)
            row |= {"plan": target.plan.sentence(), "decided by": explain.deciding(target)}
        except Refused as refused:
            row |= {"plan": "refused", "decided by": refused.rule}
        rows.append(row)
    if as_json:
        _print_json({"presets": rows})
    else:
        _print_table([list(row.values()) for row in rows], head=list(rows[0]))


def _width() -> int:
    """Columns to wrap at: the terminal's, within what reads well; 80 for a pipe."""
    import shutil

    return max(60, min(shutil.get_terminal_size().columns, 100)) if sys.stdout.isatty() else 80


def _print_lines(lines: Sequence[Line]) -> None:
    """Explanations; headings in bold where there is a terminal that wants it."""
    bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for line in lines:
        print(f"\x1b[1m{line.text}\x1b[0m" if bold and line.heading and line.text else line.text)


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=2))


def _print_table(rows: Iterable[Sequence[str]], head: Sequence[str]) -> None:
    """A table for a person; for a pipe one line a row, tabs between, no head."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*head, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _complain(error: TitanError) -> ExitCode:
    _say(f"error: {error.message}")
    if error.hint:
        _say(error.hint)
    return error.code


def _usage(error: Any) -> TitanError:
    """What typer says about a command line, with its help or the key that was meant (`--steps 10` for training.steps=10)."""
    from titan_cli.config.options import options

    context = getattr(error, "ctx", None)
    name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    keys = [key for key in options() if key.endswith(f".{name}")]
    meant = f"{' or '.join(keys)} is an option of the run: write {keys[0]}=VALUE. " if keys else ""
    return TitanError(error.format_message(), hint=f"{meant}See `{context.command_path if context else 'titan'} --help`.")


def _unexpected(error: Exception) -> ExitCode:
    import errno
    import traceback

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        full = f"no space left to write {error.filename or 'the run folder'}"
        return _complain(TitanError(full, "free some space and repeat the line", ExitCode.UNEXPECTED))

    if isinstance(error, OSError) and error.filename is not None:
        return _complain(
            TitanError(f"{error.filename}: {error.strerror}", "check the path and its permissions", ExitCode.REFUSED)
        )
    traceback.print_exception(error, limit=-3)
    _say("error: titan did not expect this. Please report it, with the lines above and the command.")
    return ExitCode.UNEXPECTED


def _say(text: str) -> None:
    """To stderr: stdout holds results only."""
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
