"""`dwslm bench step`: whole training steps of one or several builds, each in a process of its own."""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dwslm.bench.step_builds import BUILDS, GROUPS, MEANING, PEER, Measurement, named
from dwslm.cli.bench_host import PACKAGES, host
from dwslm.cli.errors import make_console
from dwslm.cli.find import commit, installed
from dwslm.runs.durable import from_json, to_json

FORMAT, KIND = 1, "step"
EXPERIMENT = "experiment=main"
LAST_WORDS = 400  # characters of a log that say how a process ended
CHOOSES = ("experiment=", "+experiment=")
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # these two as in a run, see `dwslm.cli.launch`
    "FLA_DISABLE_BACKEND_DISPATCH": "1",
    "TEARDOWN_CUPTI": "0",  # the profiler is started twice, and recorded graphs must not see it go in between
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="as for train.py; default experiment=main")
    told = "; ".join(f"{name}: {MEANING[name]}" for name in BUILDS)
    told += "".join(f"; {name}: all of {', '.join(builds)}" for name, builds in GROUPS.items())
    parser.add_argument(
        "--builds", default="main", metavar="A,B,...", help=f"measured one after the other; default main. {told}"
    )
    parser.add_argument("--peer", action="store_true", help="flash-linear-attention's own KDA model too, at the end")
    parser.add_argument("--recorded", choices=("both", "on", "off"), help="sets train.record; both: each build twice")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="of each of three timed runs; default 4")
    parser.add_argument("--warm", type=float, default=10.0, metavar="SECONDS", help="of work before them; default 10")
    parser.add_argument("--no-classes", action="store_true", help="leave out where the time goes")
    parser.add_argument(
        "--second-start",
        action="store_true",
        help="start each build again on full compiler caches: its first step only",
    )
    parser.add_argument(
        "--budget-minutes", type=float, metavar="M", help="what does not fit is a row that says so; default no limit"
    )
    parser.add_argument("--clock-cap", type=int, metavar="MHZ", help="the cap you have set on the GPU's clock")
    parser.add_argument("--out", default="bench-step.json", metavar="FILE.json", help="default bench-step.json")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if arguments.steps < 1 or arguments.warm < 0:
        raise ValueError("--steps must be 1 or more, and --warm 0 or more")
    if arguments.budget_minutes is not None and arguments.budget_minutes <= 0:
        raise ValueError("--budget-minutes must be above 0")
    console = make_console()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    overrides = list(arguments.overrides)
    if not any(override.startswith(CHOOSES) for override in overrides):
        overrides.insert(0, EXPERIMENT)
    names = arguments.builds.split(",") if arguments.builds else []
    if not names and not arguments.peer:
        raise ValueError("--builds is empty: name one, or give --peer to measure that alone")
    builds = named(names, arguments.recorded)
    check(overrides, [more for _, more in builds] or [()], console)
    folders = compiler_caches(console)
    out = Path(arguments.out)
    document: dict[str, Any] = {
        "format": FORMAT,
        "kind": KIND,
        "command": shlex.join(["dwslm", *sys.argv[1:]]),
        "commit": commit(),
        "versions": {"python": platform.python_version()} | installed(PACKAGES),
        "machine": host() | {"clock_cap_mhz": arguments.clock_cap},
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "complete": False,
        "overrides": overrides,
        "builds": [],
        "notes": [],
    }
    wanted = [(name, [*overrides, *more], False) for name, more in builds]
    wanted += [(PEER, overrides, True)] if arguments.peer else []
    call = Call(document, out, arguments.budget_minutes, console)
    for name, all_overrides, peer in wanted:
        asked = Measurement(
            name=name,
            overrides=all_overrides,
            result="",
            peer=peer,
            steps=arguments.steps,
            warm_s=arguments.warm,
            classes=not arguments.no_classes,
            caches=[str(folder) for folder in folders],
        )
        call.measure(asked, second_start=arguments.second_start)
    document["complete"] = all(build["status"] in ("ok", "missing", "refused") for build in document["builds"])
    call.save()
    console.print(table(document["builds"]))
    if any(build.get("profile") for build in document["builds"]):
        console.print(class_table(document["builds"]))
    console.print(Text(f"in {out}; dwslm bench report {out} --out DIR makes a page of it"))
    if any(build["status"] == "error" for build in document["builds"]):
        sys.exit(1)


def check(overrides: Sequence[str], more: Sequence[Sequence[str]], console: Console) -> None:
    """Composes every configuration once, and prepares the sample where it is what will be read.

    Raises:
        ValueError, and what Hydra says: for a setting that is not there, before anything has been measured.
    """
    from dwslm.cli.preflight import composed
    from dwslm.cli.prepare import prepare_sample
    from dwslm.config import SAMPLE_DATA

    for extra in more:
        config = composed([*overrides, *extra], None)
        if config.data.path == SAMPLE_DATA and not Path(SAMPLE_DATA, "train", "manifest.json").is_file():
            console.print(f"{SAMPLE_DATA} is not there yet: preparing the sample that ships with the code")
            prepare_sample(console)


def compiler_caches(console: Console) -> list[Path]:
    """The folders that the measuring processes will compile into, named in the environment that they get."""
    from dwslm.cli import child

    child.begin_cache(console)
    named = [os.environ[name] for name in (child.INDUCTOR, child.TRITON) if os.environ.get(name)]
    return [*(Path(folder) for folder in named), Path.home() / ".cache" / "cudnn_frontend"]


class Call:
    """Measuring processes one after the other; the file is written anew whenever one has something new."""

    def __init__(self, document: dict[str, Any], out: Path, budget_minutes: float | None, console: Console):
        self.document, self.out, self.console = document, out, console
        self.begun = time.monotonic()
        self.until = None if budget_minutes is None else self.begun + 60 * budget_minutes
        self.log = out.with_suffix(".log")

    def measure(self, asked: Measurement, *, second_start: bool) -> None:
        """Adds the row of a build."""
        row: dict[str, Any] = {
            "name": asked.name,
            "meaning": meaning(asked.name),
            "overrides": asked.overrides,
            "status": None,
        }
        self.document["builds"].append(row)
        self.console.print(Text(f"{asked.name}: {row['meaning']}"))
        self._process(asked, row)
        if second_start and row["status"] == "ok" and not asked.peer:
            again: dict[str, Any] = {"name": asked.name, "status": None}
            self._process(Measurement(**{**asked.as_json(), "first_only": True}), again)
            row["second_start"] = {name: again.get(name) for name in ("status", "reason", "start", "first_step_s")}
        self.save()

    def _process(self, asked: Measurement, row: dict[str, Any]) -> None:
        left = None if self.until is None else self.until - time.monotonic()
        if left is not None and left <= 0:
            row |= {"status": "skipped", "reason": "the budget was used up: measure it in a call of its own"}
            return
        with tempfile.TemporaryDirectory() as folder, self.log.open("a", encoding="utf-8") as log:
            result = Path(folder, "result.json")
            asked = Measurement(**{**asked.as_json(), "result": str(result), "started": time.time()})
            started, begin = time.monotonic(), log.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "dwslm.cli.bench_step_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
            )
            assert process.stdin is not None and process.stdout is not None
            late = threading.Event()

            def end() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(threading.TIMEOUT_MAX if left is None else left, end)
            timer.daemon = True
            timer.start()
            try:
                process.stdin.write(json.dumps(asked.as_json()))
                process.stdin.close()
                for line in process.stdout:
                    self.console.print(Text(f"  [{time.monotonic() - started:4.0f} s] {line.rstrip()}"))
                    self._take(result, row)
            except OSError:  # it ended before it had read; its code tells more
                pass
            finally:
                timer.cancel()
                if process.poll() is None and sys.exc_info()[0] is not None:
                    process.kill()
                code = process.wait()
            self._take(result, row)
            row["seconds"] = time.monotonic() - started
            if late.is_set():
                timed = "tokens_per_second" in row
                row["status"] = "ok" if timed else "skipped"
                row["reason"] = "the budget was used up" + (" before all was measured" if timed else "")
            elif code != 0 or row["status"] is None:
                words = " ".join(self.log.read_text(encoding="utf-8", errors="replace")[begin:].split())
                row |= {"status": "error", "reason": f"the process ended with code {code}: {words[-LAST_WORDS:]}"}
            if row["status"] != "ok":
                self.console.print(Text(f"  {row['status'].upper()}: {row['reason']}"))

    def _take(self, result: Path, row: dict[str, Any]) -> None:
        if result.is_file():
            found = from_json(result.read_text(encoding="utf-8"))
            self.document["machine"] |= found.pop("machine", {})
            row |= found
            self.save()

    def save(self) -> None:
        self.document["seconds"] = time.monotonic() - self.begun
        write_over(self.out, self.document)


def meaning(name: str) -> str:
    base, _, way = name.partition(" ")
    return MEANING[base] + (f", {way}" if way else "")


def write_over(path: Path, document: dict[str, Any]) -> None:
    from dwslm.bench.run import write_over as replace

    replace(path, to_json(document))


def table(builds: Sequence[dict[str, Any]]) -> Table:
    """What was measured, for the terminal."""
    shown = Table(title="Training steps", title_justify="left")
    for name in ("build", "tokens/s", "+-", "MFU", "micro-batch ms", "update ms", "idle", "peak GB", "W", "MHz",
                 "mJ/token", "first step s"):  # fmt: skip
        shown.add_column(name, justify="left" if name == "build" else "right")
    for build in builds:
        if "tokens_per_second" not in build:
            shown.add_row(Text(build["name"]), Text(f"{build['status']}: {build.get('reason') or ''}"[:80]))
            continue
        speed, runs, profile = build["tokens_per_second"], build["runs"], build.get("profile") or {}
        health = [run["health"] for run in runs if run.get("health")]
        power = [h["power_w"]["mean"] for h in health if h["power_w"]]
        clock = [h["sm_mhz"]["median"] for h in health if h["sm_mhz"]]
        energy, memory = build["energy_j_per_token"], build["peak_memory_bytes"]
        idle = profile["idle_ms"] / profile["wall_ms"] if profile.get("wall_ms") else None
        cells = [
            f"{speed['median']:,.0f}",
            f"{speed['spread']:,.0f}",
            cell(build["mfu"], "{:.1%}"),
            cell((build["micro_batch_ms"] or {}).get("median"), "{:,.1f}"),
            cell((build["update_ms"] or {}).get("median"), "{:,.1f}"),
            cell(idle, "{:.1%}"),
            cell(memory and memory / 1e9, "{:.1f}"),
            cell(sum(power) / len(power) if power else None, "{:.0f}"),
            cell(sum(clock) / len(clock) if clock else None, "{:.0f}"),
            cell(energy and 1e3 * energy["median"], "{:.2f}"),
            f"{build['first_step_s']:.1f} ({build['start']['caches']})",
        ]
        shown.add_row(Text(build["name"]), *(Text(text) for text in cells))
    return shown


def class_table(builds: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds of a step by class, and the share of its floor."""
    profiled = [build for build in builds if build.get("profile")]
    shown = Table(title="Where the time goes: ms a step (share of the floor)", title_justify="left")
    shown.add_column("class")
    for build in profiled:
        shown.add_column(Text(build["name"]), justify="right")
    rows = [{row["class"]: row for row in build["profile"]["classes"]} for build in profiled]
    for name in dict.fromkeys(name for by_class in rows for name in by_class):
        found = [by_class.get(name) for by_class in rows]
        told = [row and f"{row['ms']:,.1f} ({cell(row['floor_share'], '{:.0%}')})" for row in found]
        shown.add_row(Text(name), *(Text(text or "-") for text in told))
    for name, field in (("idle", "idle_ms"), ("whole step", "wall_ms")):
        shown.add_row(Text(name), *(Text(f"{build['profile'][field]:,.1f}") for build in profiled))
    return shown


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
