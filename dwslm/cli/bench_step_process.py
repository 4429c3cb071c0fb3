"""The measuring process of `dwslm bench step`: builds what train.py would build, does its steps, and writes what it found.

Asked by JSON on standard input (`dwslm.bench.step_builds.Measurement`); tells how far it is on standard output.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from dwslm.bench.step_builds import Measurement
from dwslm.runs.durable import to_json


def main() -> None:
    asked = Measurement(**json.loads(sys.stdin.read()))
    told = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is not for the user
    found: dict[str, Any] = {"status": None}

    def keep(**more: Any) -> None:
        found.update(more)
        new = Path(f"{asked.result}.new")
        new.write_text(to_json(found), encoding="utf-8")
        new.replace(asked.result)

    def say(text: str) -> None:
        print(" ".join(text.split()), file=told, flush=True)

    from dwslm.cli.bench_step_measure import measure_build, measure_peer
    from dwslm.cli.errors import raised_by_us

    try:
        (measure_peer if asked.peer else measure_build)(asked, keep, say)
    except ValueError as error:
        if not raised_by_us(error):
            raise
        keep(status="refused", reason=str(error))


if __name__ == "__main__":
    main()
