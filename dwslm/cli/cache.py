"""`dwslm cache check | heal | clear`: the compiler caches of this user, damaged entries, quarantines."""

import argparse
import getpass
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dwslm.cli.child import INDUCTOR, TRITON, cache_root
from dwslm.cli.errors import make_console
from dwslm.machine import compiler_cache


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="check, heal or clear the compiler caches",
        description="A reset of the machine can leave empty files in the caches of Inductor and Triton that break later runs.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, what, function in (
        ("check", "list damaged files; exit code 1 where there are any", run_check),
        ("heal", "move what is damaged to a quarantine beside the cache", run_heal),
        ("clear", "delete caches and quarantines of this project's runs", run_clear),
    ):
        verb = verbs.add_parser(name, help=what)
        verb.add_argument(
            "--folder", action="append", metavar="DIR", help="this cache alone (again for more); default: all known"
        )
        verb.set_defaults(run=function)


def caches(arguments: argparse.Namespace) -> list[Path]:
    """The folders to look at.

    Raises:
        ValueError: for one that is not there.
    """
    if arguments.folder:
        for folder in map(Path, arguments.folder):
            if not folder.is_dir():
                raise ValueError(f"--folder {folder}: no such folder")
        return [Path(folder) for folder in arguments.folder]
    return [folder for folder in [*own_caches(), *common_caches()] if folder.is_dir()]


def own_caches() -> list[Path]:
    """Those that this project's runs made: one for each Inductor and Triton of each key."""
    root = cache_root()
    keys = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    return [key / name for key in keys for name in ("inductor", "triton") if (key / name).is_dir()]


def common_caches() -> list[Path]:
    """Where Inductor, Triton and cuDNN frontend keep what they compiled when nobody tells them."""
    home = Path.home()
    return [
        Path(os.environ.get(INDUCTOR) or Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")),
        Path(os.environ.get(TRITON) or home / ".triton" / "cache"),
        home / ".cache" / "cudnn_frontend",
    ]


def recent(folder: Path) -> float:
    """Younger files are left alone. In a cache of ours that no process uses, no file is too young."""
    ours = cache_root() in folder.parents and not compiler_cache.users(folder.parent)
    return 0.0 if ours else compiler_cache.RECENT_S


def run_check(arguments: argparse.Namespace) -> None:
    console = make_console()
    table = Table(title="Compiler caches", title_justify="left")
    for name in ("cache", "files", "MB", "damaged"):
        table.add_column(name, justify="left" if name == "cache" else "right", overflow="fold")
    bad: list[compiler_cache.Damage] = []
    for folder in caches(arguments):
        files, size = compiler_cache.size(folder)
        damaged = compiler_cache.scan(folder, deep=True, recent_s=recent(folder))
        table.add_row(Text(str(folder)), f"{files:,}", f"{size / 1e6:.1f}", str(len(damaged)))
        bad += damaged
    console.print(table)
    for damage in bad:
        console.print(Text(f"{damage.path}: {damage.why}"))
    if bad:
        console.print(f"{len(bad)} damaged; `dwslm cache heal` moves their entries aside")
        sys.exit(1)


def run_heal(arguments: argparse.Namespace) -> None:
    console = make_console()
    moved = [
        part for folder in caches(arguments) for part in compiler_cache.move_aside([folder], recent(folder), deep=True)
    ]
    for part in moved:
        console.print(Text(f"moved {part.source} to {part.target}"))
    console.print(f"{len(moved)} parts moved aside" if moved else "nothing is damaged")


def run_clear(arguments: argparse.Namespace) -> None:
    console = make_console()
    # Others' caches only by name: they may serve programs that are none of ours.
    folders = caches(arguments) if arguments.folder else own_caches()
    for folder in folders:
        users = compiler_cache.users(folder.parent)
        if users:
            raise ValueError(f"{folder.parent} is in use by {users} running processes; stop them first")
    gone = files = size = 0
    for folder in folders:
        for path in [folder, *folder.parent.glob(f"{folder.name}-quarantine-*")]:
            more_files, more_bytes = compiler_cache.size(path)
            compiler_cache.remove(path)
            gone, files, size = gone + 1, files + more_files, size + more_bytes
    console.print(f"{gone} folders deleted: {files:,} files, {size / 1e6:.1f} MB", highlight=False)
