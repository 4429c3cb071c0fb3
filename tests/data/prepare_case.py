"""Made-up text for tests of `prepare`, and a process that prepares it and kills itself."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from dwslm.data.prepare_settings import PrepareSettings

WORDS = ["river", "house", "letter", "winter", "garden", "über", "日本", "привет", "12345", "(", ")", "="]


def records(count: int, prefix: str = "t", seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(f"{prefix}{seed}")
    return [
        {
            "id": f"{prefix}{number}",
            "text": " ".join(draw.choices(WORDS, k=draw.randint(1, 60))),
            "source": draw.choice(["web", "books"]),
            "language": draw.choice(["en", "de", "ja"]),
            "page": f"page{number // 4}",
            "license": draw.choice(["MIT", "public-domain"]),
        }
        for number in range(count)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    raw = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    path.write_bytes(gzip.compress(raw) if path.name.endswith(".gz") else raw)
    return str(path)


def settings(out: object, text: tuple[Any, Any], **changes: Any) -> PrepareSettings:
    given = {"train": [text[0]], "valid": [text[1]], "vocab_size": 300, "shard_tokens": 1500}
    return PrepareSettings(out=str(out), **{**given, **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def neighbours(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if folder.name in path.name)


# Runs prepare and kills itself with SIGKILL just before the n-th time that a file is opened, renamed or removed in
# the folder of `out`, or that a chunk is done. If it gets through, it says how often that was, and at which times a
# folder was given another name.
CHILD = """
import json, os, resource, signal, sys
import dwslm.data.lines
from dwslm.data.prepare import prepare
from dwslm.data.prepare_settings import PrepareSettings
settings, deadline, chunk_bytes = sys.argv[1:]
settings = json.loads(settings)
out = settings["out"]
if int(chunk_bytes):
    dwslm.data.lines.CHUNK_BYTES = int(chunk_bytes)
count, renames = 0, []
def tick():
    global count
    count += 1
    if count == int(deadline):
        os.kill(os.getpid(), signal.SIGKILL)
def watch(event, args):
    watched = ("open", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree")
    if event in watched and str(args[0]).startswith(os.path.dirname(out)):
        if event == "os.rename" and args[0] in (out, out + ".partial"):
            renames.append(count + 1)
        tick()
sys.addaudithook(watch)
prepare(PrepareSettings(**settings), lambda done: tick())
print(count, *renames)
"""


def run(
    out: Path, text: tuple[str, str], *, kill_at: int = 0, chunk_bytes: int = 0, before: str = "", **changes: Any
) -> "subprocess.CompletedProcess[str]":
    """Prepare in a process of its own; `before` is code to run first."""
    given = {"out": str(out), "train": [text[0]], "valid": [text[1]], "vocab_size": 300, "shard_tokens": 1500}
    code = CHILD.replace("count, renames", f"{before}\ncount, renames", 1)
    arguments = json.dumps({**given, "overwrite": True, **changes}), str(kill_at), str(chunk_bytes)
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
