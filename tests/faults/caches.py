"""7. Compiler caches after a reset: every kind of file emptied, cut or zeroed, and the next run that compiles."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

from tests.faults.cases import need

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
from dwslm.cli import child
from dwslm.cli.errors import make_console
child.begin_cache(make_console())
import torch

@torch.compile(dynamic=False, fullgraph=True)
def f(x, y):
    return (torch.relu(x @ y).softmax(-1) * y.sin()).sum()

x = torch.arange(64.0).view(8, 8).div(64).requires_grad_()
f(x, x.t()).backward()
print("value", x.grad.double().sum().item())
sys.stdout.flush()
if sys.argv[1] == "reset":  # nothing is put in order at the end
    os._exit(0)
"""


def compile_in(cache: Path, how: str = "clean") -> tuple[int, str]:
    """Compiles and runs a function in a process whose compiler caches lie in `cache`. Returns its code and output."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1", "COLUMNS": "400"}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def value(said: str) -> str:
    return next((line for line in said.splitlines() if line.startswith("value")), "none")


class WarmCache:
    """A cache that a run has filled and left behind without ending cleanly."""

    def __init__(self, folder: Path):
        self.folder = folder
        code, said = compile_in(folder, "reset")
        assert code == 0, said
        self.value = value(said)
        [self.inductor] = folder.glob("dwslm/compiled/*/inductor")
        files = [
            path.relative_to(folder) for path in self.inductor.rglob("*") if path.is_file() and path.stat().st_size
        ]
        # A kind is an ending, or for those without one the folder that they lie in.
        self.kinds: dict[str, list[Path]] = {}
        for path in sorted(files):
            folders = [part for part in path.parts if part in ("fxgraph", "aotautograd")]
            self.kinds.setdefault(folders[0] if folders else path.suffix or path.name, []).append(path)

    def damage(self, cache: Path, n: int, draw: random.Random) -> str:
        """Copies this cache to `cache` and damages it in the n-th way. Returns which."""
        shutil.copytree(self.folder, cache, symlinks=True)
        kinds = sorted(self.kinds)
        turn, which = divmod(n, len(kinds) + 2)
        if which == len(kinds):
            for paths in self.kinds.values():
                for path in paths:
                    os.truncate(cache / path, 0)
            return "everything emptied"
        if which == len(kinds) + 1:
            entry = cache / self.inductor.relative_to(self.folder).parent / "triton" / f"ENTRY{n}"
            entry.mkdir(parents=True)
            (entry / "kernel.cubin").write_bytes(b"\x7fELF" + bytes(60))
            (entry / "kernel.json").write_text('{"name": "kernel", "num_war')
            return "Triton metadata cut"
        kind = kinds[which]
        how = ("emptied", "zeroed", "cut")[turn % 3]
        for path in self.kinds[kind]:
            size = (cache / path).stat().st_size
            os.truncate(cache / path, size // 2 if how == "cut" else 0)
            if how == "zeroed":
                os.truncate(cache / path, size)
        return f"{kind} {how}"


def damaged_cache(warm: WarmCache, folder: Path, n: int, draw: random.Random) -> str:
    """Raises Lost where the next run does not get through with the right value."""
    how = warm.damage(folder, n, draw)
    code, said = compile_in(folder)
    need(code == 0, f"{how}: ended with code {code}: {said[-400:]}")
    need(value(said) == warm.value, f"{how}: {value(said)}, not {warm.value}")
    if how.startswith("Triton"):
        need("damaged compiler cache" in said, f"{how}: not found")
    return how
