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
heavy = {"torch", "datasets", "tiktoken", "tokenizers", "transformers", "numpy", "titan_cli.worker"} & set(sys.modules)
assert not heavy, heavy
"""


def test_no_command_of_the_front_imports_torch_datasets_or_tiktoken() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
