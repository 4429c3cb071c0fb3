"""The rules of the house: who may import whom, and what no file may hold.

Each rule is a function from a root folder to a list of `path:line: what is wrong`. The project must give an
empty list; a small tree made in a temporary folder, with the rule broken, must not.
"""

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400

# Part of the library -> the other parts it may import. What is not listed may not be there.
PARTS: dict[str, set[str]] = {
    "data": set(),
    "ops": set(),
    "machine": set(),
    "runs": set(),
    "model": {"ops"},
    "optim": {"ops"},
    "evaluate": {"model", "data"},
    "train": {"data", "ops", "machine", "runs", "model", "optim", "evaluate"},
    "bench": {"data", "ops", "machine", "runs", "model", "optim", "evaluate", "train"},
    "page": {"runs"},  # it reads files only; `runs` holds the reader of run folders
    "": set(),  # dwslm/__init__.py: importing the package does nothing
}
ENTRY_PARTS = {"cli", "config"}  # these see every part, and no part sees them
WITHOUT_TORCH = {"runs", "machine", "page"}
# A configuration library or command-line parser -> the files of the package that may meet it.
AT_THE_DOOR = {"omegaconf": {"config"}, "hydra": {"config", "cli"}, "argparse": {"cli"}}
ERRORS = {"hydra.errors", "omegaconf.errors"}  # `cli` turns these into one line

RUNS_CODE_FROM_DATA = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {
    "eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "pandas.read_pickle",
}  # fmt: skip

CODE_NAMES = {"Makefile", "run"}
CODE_SUFFIXES = {".py", ".sh", ".toml", ".yaml", ".yml"}

# Written in two pieces, or this file would break the rule it checks.
REGISTRY_HOSTS = [
    "pypi" + ".org", "pypi" + ".python.org", "python" + "hosted.org", "download" + ".pytorch.org",
    "pypi" + ".nvidia.com", "conda" + ".anaconda.org", "registry" + ".npmjs.org",
]  # fmt: skip


# ---- reading a tree -------------------------------------------------------------------------------------


def project_files(root: Path) -> list[Path]:
    """Files that git tracks or would (untracked, not ignored); all files where there is no git."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True,
    )  # fmt: skip
    # A folder inside someone else's checkout, ignored there, lists nothing of its own.
    paths = [root / name.decode() for name in listing.stdout.split(b"\0") if name]
    if listing.returncode or not paths:
        paths = [path for path in root.rglob("*") if ".git" not in path.parts and ".venv" not in path.parts]
    return sorted(path for path in set(paths) if path.is_file())


def python_files(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in project_files(root):
        if path.suffix == ".py":
            yield path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def part_of(path: Path, root: Path) -> str | None:
    """`data` for dwslm/data/shards.py, `cli` for dwslm/cli.py, None outside dwslm/."""
    names = path.relative_to(root).with_suffix("").parts
    if names[0] != "dwslm":
        return None
    return "" if names[1] == "__init__" else names[1]


def dotted(node: ast.AST) -> str:
    """`os.environ` for that expression; `` for anything that isn't a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def imports(path: Path, tree: ast.Module, root: Path) -> Iterator[tuple[int, str]]:
    """Every imported dotted name with its line, relative ones resolved; `from a import b` gives `a.b`."""
    package = path.relative_to(root).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def names_used(path: Path, tree: ast.Module, root: Path) -> Iterator[tuple[int, str]]:
    """Every dotted name used or imported, with `import x as y` undone."""
    original = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }
    yield from imports(path, tree, root)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            head, _, rest = name.partition(".")
            yield node.lineno, f"{original.get(head, head)}.{rest}"


# ---- the rules ------------------------------------------------------------------------------------------


def borders(root: Path) -> list[str]:
    wrong = []
    for path, tree in python_files(root):
        part = part_of(path, root)
        if part is None:
            continue
        where = path.relative_to(root)
        if part not in PARTS and part not in ENTRY_PARTS:
            wrong.append(f"{where}:1: dwslm/{part} is no part of the design; give it a rule in PARTS")
            continue
        for line, name in imports(path, tree, root):
            top, *rest = name.split(".")
            if top == "dwslm" and part not in ENTRY_PARTS:
                target = rest[0] if rest and rest[0] != "__version__" else ""
                if target not in {part, ""} | PARTS[part]:
                    wrong.append(f"{where}:{line}: `{part or 'dwslm'}` may not import dwslm.{target}")
            if part in WITHOUT_TORCH and (top == "torch" or name.startswith("safetensors.torch")):
                wrong.append(f"{where}:{line}: `{part}` may not import torch")
            caught = part == "cli" and name.rpartition(".")[0] in ERRORS
            if top in AT_THE_DOOR and part not in AT_THE_DOOR[top] and not caught:
                wrong.append(f"{where}:{line}: {top} may be met only in {sorted(AT_THE_DOOR[top])}")
    return wrong


def process_reads(root: Path) -> list[str]:
    """Reads of the environment or the command line in the library: both stop at the entry points."""
    banned = {"os.environ", "os.environb", "os.getenv", "os.putenv", "sys.argv", "sys.orig_argv"}
    wrong = []
    for path, tree in python_files(root):
        part = part_of(path, root)
        if part is None or part == "cli":
            continue
        for line, name in sorted(set(names_used(path, tree, root))):
            if name in banned:
                wrong.append(f"{path.relative_to(root)}:{line}: {name} outside the entry points")
    return wrong


def unsafe_code(root: Path) -> list[str]:
    """Calls and modules that run what they read: pickle in all its forms, eval, exec."""
    wrong = []
    for path, tree in python_files(root):
        where = path.relative_to(root)
        found = set()
        for line, name in imports(path, tree, root):
            if name.split(".")[0] in RUNS_CODE_FROM_DATA:
                found.add((line, f"imports {name}"))
        for line, name in names_used(path, tree, root):
            if name in UNSAFE_CALLS:
                found.add((line, f"uses {name}"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if dotted(node.func) in UNSAFE_CALLS:
                found.add((node.lineno, f"uses {dotted(node.func)}"))
            for keyword in node.keywords:
                no_pickle = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                # A test may write one, to see it refused.
                bait = where.parts[0] == "tests" and dotted(node.func) == "np.save"
                if keyword.arg == "allow_pickle" and not no_pickle and not bait:
                    found.add((node.lineno, "uses allow_pickle other than False"))
        wrong += [f"{where}:{line}: {what}" for line, what in sorted(found)]
    return wrong


def long_files(root: Path) -> list[str]:
    wrong = []
    for path in project_files(root):
        if path.suffix in CODE_SUFFIXES or path.name in CODE_NAMES:
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MAX_LINES:
                wrong.append(f"{path.relative_to(root)}: {lines} lines, {MAX_LINES} at most")
    return wrong


def registry_hosts(root: Path) -> list[str]:
    """Hosts of package registries, in any file: where packages come from is for pip's own settings to say."""
    wrong = []
    for path in project_files(root):
        content = path.read_bytes()
        for host in REGISTRY_HOSTS:
            at = content.find(host.encode())
            if at >= 0:
                line = content.count(b"\n", 0, at) + 1
                wrong.append(f"{path.relative_to(root)}:{line}: names {host}")
    return wrong


RULES = [borders, process_reads, unsafe_code, long_files, registry_hosts]


@pytest.mark.parametrize("rule", RULES)
def test_the_project_keeps_the_rule(rule):
    assert not rule(ROOT), "\n" + "\n".join(rule(ROOT))


def test_parts_without_torch_load_without_torch():
    """The rule above sees what is written; this sees what is loaded, through other packages too."""
    folders = [str(ROOT / "dwslm" / part) for part in sorted(WITHOUT_TORCH)]
    modules = [
        f"dwslm.{Path(module.module_finder.path).name}.{module.name}" for module in pkgutil.iter_modules(folders)
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- each rule can fail ---------------------------------------------------------------------------------

BROKEN = [
    (borders, "dwslm/data/a.py", "from dwslm.model import lm", "`data` may not import dwslm.model"),
    (borders, "dwslm/ops/kda/a.py", "from ...optim import muon", "`ops` may not import dwslm.optim"),
    (borders, "dwslm/model/a.py", "from .. import data", "`model` may not import dwslm.data"),
    (borders, "dwslm/optim/a.py", "import dwslm.model.lm", "`optim` may not import dwslm.model"),
    (borders, "dwslm/evaluate/a.py", "if 1:\n    from dwslm.train import loop", "a.py:2: "),
    (borders, "dwslm/train/a.py", "from dwslm.config import RunConfig", "import dwslm.config"),
    (borders, "dwslm/train/a.py", "from dwslm import cli", "`train` may not import dwslm.cli"),
    (borders, "dwslm/page/a.py", "from dwslm.bench import report", "`page` may not import"),
    (borders, "dwslm/__init__.py", "from dwslm.model import lm", "`dwslm` may not import"),
    (borders, "dwslm/utils/a.py", "", "dwslm/utils is no part of the design"),
    (borders, "dwslm/runs/a.py", "import torch.nn as nn", "`runs` may not import torch"),
    (borders, "dwslm/machine/a.py", "from safetensors.torch import load_file", "import torch"),
    (borders, "dwslm/page/a.py", "import importlib\nimportlib.import_module('torch')", "a.py:2:"),
    (borders, "dwslm/model/a.py", "from omegaconf import DictConfig", "omegaconf may be met only in"),
    (borders, "dwslm/cli/run.py", "from omegaconf import OmegaConf", "omegaconf may be met only in"),
    (borders, "dwslm/data/a.py", "import argparse", "argparse may be met only in ['cli']"),
    (process_reads, "dwslm/data/a.py", "import os\n\nx = os.environ['X']", "a.py:3: os.environ"),
    (process_reads, "dwslm/train/a.py", "import os as o\nx = o.getenv('X')", "os.getenv outside"),
    (process_reads, "dwslm/train/a.py", "from os import environ", "os.environ outside"),
    (process_reads, "dwslm/config.py", "import sys\nx = sys.argv[1:]", "sys.argv outside"),
    (unsafe_code, "dwslm/train/a.py", "import pickle", "imports pickle"),
    (unsafe_code, "train.py", "def f(x):\n    return eval(x)", "train.py:2: uses eval"),
    (unsafe_code, "tests/a.py", "exec('1')", "uses exec"),
    (unsafe_code, "dwslm/train/a.py", "import torch\ntorch.load('x')", "uses torch.load"),
    (unsafe_code, "dwslm/train/a.py", "import torch as t\nload = t.load", "uses torch.load"),
    (unsafe_code, "dwslm/train/a.py", "from torch import load", "uses torch.load"),
    (unsafe_code, "dwslm/data/a.py", "np.load('x', allow_pickle=True)", "allow_pickle other than False"),
    (long_files, "dwslm/a.py", "x = 1\n" * (MAX_LINES + 1), "401 lines"),
    (long_files, "Makefile", "#\n" * (MAX_LINES + 1), "401 lines"),
    (registry_hosts, "docs/a.md", "one\nhttps://" + REGISTRY_HOSTS[0] + "/simple", "docs/a.md:2: names"),
]  # fmt: skip

SOUND = {
    "dwslm/__init__.py": '__version__ = "0"',
    "dwslm/cli/__init__.py": "import os, sys\nfrom dwslm.config import compose\nx = os.environ, sys.argv",
    "dwslm/cli/errors.py": "from omegaconf.errors import OmegaConfBaseException",
    "dwslm/config.py": "from omegaconf import OmegaConf\nfrom dwslm.train import loop",
    "dwslm/data/a.py": "from dwslm import __version__\nfrom . import b\nfrom .b import c\nimport torch",
    "dwslm/data/b.py": "import numpy as np\nc = np.load('x', allow_pickle=False)\nos = None",
    "dwslm/evaluate/a.py": "from dwslm.model.lm import LM\nfrom ..data import shards\nmodel.eval()",
    "dwslm/train/a.py": "from dwslm.runs import writer\nfrom ..ops import kda",
    "dwslm/runs/a.py": "import json\nfrom .b import load\ntorch = 'a word'",
    "dwslm/page/a.py": "from dwslm.runs import reader",
    "train.py": "import hydra, os\nfrom dwslm.config import RunConfig\nx = os.environ",
    "docs/a.md": "A long page.\n" * (MAX_LINES + 1),
}


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("rule", "name", "text", "expected"), BROKEN)
def test_a_broken_rule_is_found(rule, name, text, expected, tmp_path):
    wrong = rule(plant(tmp_path, SOUND | {name: text}))
    assert len(wrong) == 1
    assert expected in wrong[0]


@pytest.mark.parametrize("rule", RULES)
def test_a_sound_tree_passes(rule, tmp_path):
    assert rule(plant(tmp_path, SOUND)) == []


def test_untracked_files_count_and_ignored_files_do_not(tmp_path):
    bad = "https://" + REGISTRY_HOSTS[0]
    plant(tmp_path, {".gitignore": "/wheelhouse/\n", "wheelhouse/a.txt": bad, "docs/new.md": bad})
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert registry_hosts(tmp_path) == [f"docs/new.md:1: names {REGISTRY_HOSTS[0]}"]
