"""What a row of metrics says of each rank's time, on two processes of which one is slow on purpose."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SLOW = 0.4  # seconds that rank 1 computes for longer
SCRIPT = f"""
import json, time
import torch
from dwslm.cli.ranks import meet

with meet() as ranks:
    ranks.choose_device("cpu")
    begun = time.perf_counter()
    time.sleep({SLOW} * ranks.rank)
    ranks.sum(torch.zeros(()))  # the loss, as TrainStep.update; then as Optimizer.step
    ranks.scatter_sum(torch.zeros(2000))
    ranks.gather(torch.zeros(2000))
    with ranks.patience():  # a save, of which no row knows
        time.sleep({SLOW} * ranks.rank)
        ranks.gather(torch.zeros(2000))
    seconds = time.perf_counter() - begun
    row = ranks.busy(seconds, 1)
    after = ranks.busy(0.0, 1)
    if ranks.leads:
        print(json.dumps([seconds, row, after]))
"""


def test_the_slow_rank_is_named_and_exchanges_are_apart_from_waiting():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--no-python"]
    done = subprocess.run(
        [*command, sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    seconds, row, after = json.loads(done.stdout)
    assert row["slowest_rank"] == 1
    quick, slow = row["rank_seconds"]
    # Rank 0 waited for rank 1 where they met first; what it waited within `patience` is no part of a step's collectives.
    assert slow - quick > 0.9 * SLOW and slow > 2 * 0.9 * SLOW
    assert 0 < row["scatter_seconds"] < SLOW and 0 < row["gather_seconds"] < SLOW
    assert after["scatter_seconds"] == after["gather_seconds"] == 0
