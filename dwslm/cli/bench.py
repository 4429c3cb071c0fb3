"""`dwslm bench`: kernels held to their references, timed, recorded; the figures as JSON, as a page, side by side."""

import argparse
import getpass
import os
import platform
import secrets
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dwslm.cli import bench_report, bench_step
from dwslm.cli.bench_host import PACKAGES, host
from dwslm.cli.errors import make_console
from dwslm.cli.find import commit, installed
from dwslm.cli.prepare import prepare_sample
from dwslm.config import SAMPLE_DATA

OPS = (
    "attention", "delta_rule", "mlp", "projection", "head", "short_conv", "delta_gate", "gated_norm", "depth_mix", "norm",
    "add_norm", "rope", "newton_schulz", "optimizer",
)  # fmt: skip
CPU_SIZES: dict[str, Any] = {"tokens": [2048], "contexts": [256, 1024], "heads": [2, 4]}
GPU_SIZES: dict[str, Any] = {"tokens": [16_384, 65_536], "contexts": [512, 1024, 2048, 4096], "heads": [8, 16]}
# Read by the libraries when they are imported, and handed on to the measuring process.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic checks need it before the first product
    "FLA_DISABLE_BACKEND_DISPATCH": "1",  # an unrelated package must not reroute kernels
    "FLA_CACHE_RESULTS": "1",  # what tuning found is kept on disk, kernel by kernel
    "TRITON_CACHE_AUTOTUNING": "1",
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="prove, time and record every kernel on this machine; show and compare the figures",
        description="Every engine is held to its float32 reference before it is timed. See docs/benchmark.md.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add_run(verbs.add_parser("day0", help="all operations, in 10 minutes or less"), list(OPS))
    for op in OPS:
        add_run(verbs.add_parser(op, help=f"the operation {op} alone"), [op])
    bench_step.add_arguments(verbs.add_parser("step", help="whole training steps of one or several builds"))
    report = verbs.add_parser("report", help="benchmark JSON as Markdown and one HTML file")
    bench_report.add_arguments_report(report)
    report.set_defaults(run=bench_report.run_report)
    compare = verbs.add_parser("compare", help="what moved between two runs, beyond the spread of both")
    bench_report.add_arguments_compare(compare)
    compare.set_defaults(run=run_compare)


def add_run(parser: argparse.ArgumentParser, ops: list[str]) -> None:
    parser.add_argument(
        "--data",
        default="sample",
        metavar="DIR",
        help="a prepared dataset; default: the sample that ships with the code",
    )
    parser.add_argument(
        "--out", metavar="FILE.json", help="default: bench-VERB.json; what libraries print goes beside it"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        metavar="N",
        help="tokens of a batch, the first one gated and recorded; default 16384 65536",
    )
    parser.add_argument("--contexts", type=int, nargs="+", metavar="N", help="row lengths; default 512 1024 2048 4096")
    parser.add_argument(
        "--heads", type=int, nargs="+", metavar="N", help="heads of the linear-attention kernels; default 8 16"
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, metavar="OP", default=ops, help=f"out of {', '.join(OPS)}")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="only these engines")
    parser.add_argument(
        "--budget-minutes",
        type=float,
        default=10.0,
        metavar="M",
        help="what does not fit is listed as skipped; default 10",
    )
    parser.add_argument("--quick", action="store_true", help="only the first number of tokens and the longest context")
    parser.add_argument("--seed", type=int, metavar="N", help="of batches and inputs; default: a new one, printed")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="timed calls; default 20")
    parser.add_argument(
        "--clock-cap",
        type=int,
        metavar="MHZ",
        help="the cap you have set on the GPU's clock (it cannot always be read back)",
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.set_defaults(run=run)


def run_compare(arguments: argparse.Namespace) -> None:
    if code := bench_report.run_compare(arguments):
        sys.exit(code)


def run(arguments: argparse.Namespace) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # After the environment: these import torch.
    import torch

    from dwslm.bench.request import Request
    from dwslm.bench.run import Run
    from dwslm.machine.compiler_cache import move_aside

    console = make_console()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if arguments.device == "auto" else arguments.device
    if device == "cpu":
        console.print(
            "no GPU: the CPU forms of all operations, at the sizes of a small model; they say nothing about a GPU"
        )
    sizes = CPU_SIZES if device == "cpu" else GPU_SIZES
    request = Request(
        data=str(find_data(arguments.data, console)),
        seed=secrets.randbits(31) if arguments.seed is None else arguments.seed,
        ops=list(arguments.ops),
        tokens=arguments.tokens or sizes["tokens"],
        contexts=arguments.contexts or sizes["contexts"],
        heads=arguments.heads or sizes["heads"],
        engines=arguments.engines,
        budget_s=60 * arguments.budget_minutes,
        quick=arguments.quick,
        small=device == "cpu",
        device=device,
        repeats=arguments.repeats,
        warm_up_s=0.15 if device == "cuda" else 0.01,
    )
    folders = cache_folders() if device == "cuda" else []
    moved = move_aside(folders)
    for part in moved:
        console.print(Text(f"empty file in a compiler cache: moved {part.source} to {part.target}"))
    about = {
        "kind": arguments.verb,
        "command": shlex.join(["dwslm", *sys.argv[1:]]),
        "commit": commit(),
        "versions": {"python": platform.python_version()} | installed(PACKAGES),
        "machine": host() | {"clock_cap_mhz": arguments.clock_cap},
    }
    out = Path(arguments.out or f"bench-{arguments.verb}.json")
    bench = Run(
        request,
        out,
        say=lambda text: console.print(Text(text)),
        about=about,
        cache=(folders, moved),
        inline=device == "cpu",
    )
    document = bench.run()
    counts = {
        status: sum(row["status"] == status for row in document["rows"])
        for status in ("ok", "failed", "missing", "refused", "error", "skipped")
    }
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.print(
        Text(f"{document['seconds']:.0f} s: {told}; in {out}; dwslm bench report {out} --out DIR makes a page of it")
    )


def find_data(which: str, console: Console) -> Path:
    """The folder of a prepared dataset's training split, absolute.

    Raises:
        ValueError: where there is none.
    """
    if which == "sample":
        if not Path(SAMPLE_DATA, "train", "manifest.json").is_file():
            console.print(f"{SAMPLE_DATA} is not there yet: preparing the sample that ships with the code")
            prepare_sample(console)
        which = SAMPLE_DATA
    for folder in (Path(which), Path(which) / "train"):
        if (folder / "manifest.json").is_file():
            return folder.resolve()
    raise ValueError(
        f"{which} is no prepared dataset: make one with `dwslm prepare`, or leave --data out for the sample"
    )


def cache_folders() -> list[Path]:
    """Where Triton, Inductor and cuDNN frontend keep what they compiled."""
    home = Path.home()
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return [
        Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache")),
        Path(inductor) if inductor else Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"),
        home / ".cache" / "cudnn_frontend",
    ]
