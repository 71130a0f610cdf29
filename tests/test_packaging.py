"""What reaches a person: the wheel, the sdist, an archive and a clone of the repository, the Makefile's lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

import titan_cli
from titan_cli import cli

ROOT = Path(__file__).parent.parent
LINKS = ("models", "presets", "tokenizer")
DIST = f"titan_cli-{titan_cli.__version__}"
Files = Mapping[str, bytes]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Its stdout; its stderr is in the failure. PYTHONPATH must not bring the checkout back."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*args: str | Path) -> None:
    run(sys.executable, "-m", "pip", *args, "--quiet", "--no-index", "--no-deps")


def wheel_of(source: Path, out: Path) -> Path:
    """What `pip install SOURCE` builds first; no network, the backend is the one that runs the tests."""
    pip("wheel", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", out, source)
    (wheel,) = out.glob("*.whl")
    return wheel


def wheel_files(wheel: Path) -> Files:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def package_files() -> Files:
    """titan_cli/ as a person sees it, the links followed."""
    return {
        str(Path(folder, name).relative_to(ROOT)): Path(folder, name).read_bytes()
        for folder, _, names in os.walk(ROOT / "titan_cli", followlinks=True)
        if Path(folder).name != "__pycache__"
        for name in names
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this checkout."""
    out = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "hatchling", "build", "-d", out)
    return out


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One commit of what is here and not ignored: what a push would publish, before it is committed."""
    git_dir = tmp_path_factory.mktemp("repository") / ".git"
    run("git", "init", "--quiet", git_dir.parent)
    git = ("git", f"--git-dir={git_dir}", f"--work-tree={ROOT}", "-c", "user.name=t", "-c", "user.email=t@t")
    run(*git, "add", "--all")
    run(*git, "-c", "commit.gpgsign=false", "commit", "--quiet", "--message=tree")
    return git_dir


@pytest.fixture(scope="module")
def unpacked(built: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders to install from: the unpacked sdist, and the unpacked output of `git archive`."""
    out = tmp_path_factory.mktemp("unpacked")
    run("tar", "-xzf", built / f"{DIST}.tar.gz", "-C", out)
    run("git", f"--git-dir={repository}", "archive", f"--output={out / 'archive.tar'}", "--prefix=archive/", "HEAD")
    run("tar", "-xf", out / "archive.tar", "-C", out)
    return {"sdist": out / DIST, "archive": out / "archive"}


@pytest.mark.slow
def test_the_wheel_holds_the_package_as_real_files_and_nothing_else(built: Path) -> None:
    files = wheel_files(built / f"{DIST}-py3-none-any.whl")
    info = {name for name in files if name.startswith(f"{DIST}.dist-info/")}
    assert {name: files[name] for name in files.keys() - info} == package_files()
    assert {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"} == {n.split("/", 1)[1] for n in info}
    for name in ("presets/debug.toml", "tokenizer/titan.tiktoken", "models/llama3/model.py", "runs/folder.py"):
        assert f"titan_cli/{name}" in files


@pytest.mark.slow
def test_the_sdist_holds_the_package_as_real_files_and_no_tests(built: Path) -> None:
    with tarfile.open(built / f"{DIST}.tar.gz") as archive:
        assert all(member.isfile() for member in archive)
        names = {member.name.removeprefix(f"{DIST}/") for member in archive}
    assert names == package_files().keys() | {".gitignore", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["wheel", "sdist", "archive"])
def test_installed_from(source: str, built: Path, unpacked: Mapping[str, Path], tmp_path: Path) -> None:
    wheel = built / f"{DIST}-py3-none-any.whl"
    if source != "wheel":
        direct, wheel = wheel, wheel_of(unpacked[source], tmp_path / "wheels")
        assert wheel_files(wheel) == wheel_files(direct)

    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    pip("--python", python, "install", wheel)
    # The dependencies are borrowed from the venv that runs the tests. Its own .pth files, the editable titan among them,
    # are not read from there.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "borrowed.pth").write_text("\n".join(p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")))
    assert Path(run(python, "-c", "import titan_cli; print(titan_cli.__file__)", cwd=tmp_path)).parent == site / "titan_cli"

    titan = venv / "bin" / "titan"
    assert run(titan, "--version", cwd=tmp_path) == f"titan {titan_cli.__version__}\n"
    assert "debug" in run(titan, "presets", "ls", cwd=tmp_path)
    assert "titan_cli.worker" in run(titan, "train", "--preset", "debug", "--dry-run", cwd=tmp_path)
    script = "from titan_cli.tokenizer.tokenizer import load; t = load('titan'); print(t.decode(t.encode('def f(): pass')))"
    assert run(python, "-c", script, cwd=tmp_path) == "def f(): pass\n"


@pytest.mark.slow
def test_a_clone_without_symbolic_links_says_so_and_what_it_advises_helps(repository: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    run("git", "clone", "--quiet", "-c", "core.symlinks=false", repository, clone)
    assert all((clone / "titan_cli" / name).is_file() for name in LINKS)
    command = [sys.executable, "-c", "import titan_cli; print(titan_cli.__file__)"]
    refused = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    sentence = refused.stderr.splitlines()[-1]
    assert sentence.startswith("ImportError: titan_cli/models is not a folder: this checkout was made without symbolic links.")

    (advice,) = re.findall("`(.+)`", sentence)
    run("bash", "-c", advice, cwd=clone)
    assert all((clone / "titan_cli" / name).is_symlink() for name in LINKS)
    assert Path(run(*command, cwd=clone).strip()).parent == clone / "titan_cli"


def test_metadata_agrees_with_the_code() -> None:
    assert metadata.version("titan-cli") == titan_cli.__version__
    (titan,) = metadata.entry_points(group="console_scripts", name="titan")
    assert titan.load() is cli.main


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):.* ## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_every_phony_target_has_a_line_in_make_help() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(phony.split()) == make_targets()


def test_every_make_line_in_the_documents_has_its_target() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    code = {page: re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), flags=re.DOTALL) for page in pages}
    named = {(page.name, target) for page in pages for target in re.findall(r"\bmake ([a-z][a-z-]*)", " ".join(code[page]))}
    assert {(page, target) for page, target in named if target not in make_targets()} == set()
    assert ("pyproject.toml", "setup") in named  # the pattern still finds what is there
