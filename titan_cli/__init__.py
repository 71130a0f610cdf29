"""titan: train LLMs with native PyTorch from one command, and know that torch.compile did what you think."""

from pathlib import Path

__version__ = "0.1.0"

# models, presets and tokenizer are folders of the checkout, linked here so that there is one import root. A checkout
# made without symlinks (git's core.symlinks=false) has text files in their place, and every import would fail obscurely.
for _name in ("models", "presets", "tokenizer"):
    if not (Path(__file__).parent / _name).is_dir():
        raise ImportError(
            f"titan_cli/{_name} is not a folder: this checkout was made without symbolic links. "
            "Run `git config core.symlinks true && git checkout -- titan_cli`, or install a wheel, which needs none."
        )
