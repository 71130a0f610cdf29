"""The front never waits for the torch side: a fresh process shows what each command imports."""

import subprocess
import sys

SCRIPT = """
import sys
from titan_cli.cli import main
assert main(["--help"]) == 0
assert not {"titan_cli.config.schema", "rich.console"} & set(sys.modules), "--help imports what it does not need"
for argv in (["presets", "ls"], ["presets", "show", "debug"], ["presets", "diff", "debug", "llama3-1b"], ["options"]):
    assert main(argv) == 0, argv
dry = ["train", "--preset", "llama3-debug-2d", "--dry-run"]
for argv in (["explain-compile"], ["explain-compile", "--preset", "llama3-8b-2d"], ["explain-compile", "--rules"], dry):
    assert main(argv) == 0, argv
heavy = {"torch", "datasets", "tiktoken", "tokenizers", "transformers", "numpy"} & set(sys.modules)
heavy |= {name for name in sys.modules if name.startswith("titan_cli.worker")}
assert not heavy, heavy
"""


def test_no_command_of_the_front_imports_torch_datasets_or_tiktoken() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
