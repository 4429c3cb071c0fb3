"""A few of the faults of the matrix (`make faults` runs them all), and that the matrix sees what is lost."""

import random
import shutil
from pathlib import Path

import pytest

from dwslm.runs.folder import RunFolder
from dwslm.runs.reader import metrics
from dwslm.train import checkpoint as checkpoints
from tests.faults import cases
from tests.faults.caches import WarmCache, damaged_cache
from tests.faults.cases import GUARD, Lost, Try
from tests.faults.inject import Fault


# Not of the module: processes that share the tests come back to a module, and the same folder holds one straight run.
@pytest.fixture(scope="session")
def straight(tiny_data: Path, memory_folder: Path) -> RunFolder:
    one = Try(tiny_data, memory_folder / "straight", random.Random(0), None)  # type: ignore[arg-type]
    ended = one.child()
    assert ended.code == 0, ended.said
    return one.run()


@pytest.fixture
def one(tiny_data: Path, memory_folder: Path, straight: RunFolder, request: pytest.FixtureRequest) -> Try:
    return Try(tiny_data, memory_folder / str(abs(hash(request.node.name))), random.Random(0), straight)


def test_term_in_a_save_is_left_with_75_and_nothing_done_again(one: Try):
    assert cases.signals(one, 8) == "SIGTERM at save"


def test_the_first_nan_costs_its_step_alone(one: Try):
    assert cases.poison(one, 0) == "loss nan, once"
    assert [row["skipped"] for row in metrics(one.run())][-1] == 1
    [skip] = one.told("skip")
    assert skip["reason"] == "loss nan" and skip["rows"] == [4 * (skip["step"] - 1), 4 * skip["step"]]
    assert skip["documents"] == sorted(set(skip["documents"]))


def test_a_save_that_fails_once_leaves_training_alone(one: Try):
    assert cases.full_disk(one, 0) == "ENOSPC once in a save"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "n"),
    [
        (cases.kill_at_random_steps, 1),
        (cases.kill_in_a_save, 9),
        (cases.signals, 12),  # TERM while scoring
        (cases.signals, 29),  # INT in the first step
        (cases.signals, 7),  # HUP twice
        (cases.launcher_without_patience, 0),
        (cases.full_disk, 1),
        (cases.full_disk, 2),
        (cases.damage, 1),
        (cases.damage, 10),
        (cases.poison, 6),
        (cases.poison, 13),
        (cases.clock_set_back, 1),
    ],
)
def test_a_part_of_the_matrix(one: Try, case: cases.Case, n: int):
    case(one, n)


@pytest.mark.slow
def test_nan_for_ever_goes_back_as_often_as_it_may_and_fails_with_the_reason(one: Try):
    one.change = lambda config: setattr(config, "guard", GUARD)
    ended = one.child(Fault("update", "gradient nan", 11, 10**9))
    failed = one.told("failed")[-1]
    back = one.told("rollback")
    assert ended.code == 1 and failed["error"] == "FloatingPointError"
    assert failed["reason"].startswith("3 steps were left out from step ")
    assert failed["reason"].endswith("after going back 2 times; try a lower optim.lr")
    assert f"error: {failed['reason']}" in ended.said.replace("\n", " ")
    # Step 8 is the last checkpoint from before; each way back begins with the rows after those that were left out.
    assert [event["path"] for event in back] == ["step-00000008"] * 2
    assert back[0]["rows"] == [32, 52] and back[1]["rows"][1] == 52 + 12
    skips = one.told("skip")
    assert [skip["rows"][0] for skip in skips] == [40, 44, 48, 52, 56, 60, 64, 68, 72]
    assert [skip["step"] for skip in skips] == [11, 12, 13, *[9, 10, 11] * 2]
    # What the weights hold is what readers see.
    assert [row["step"] for row in metrics(one.run())] == list(range(1, 12))
    newest, _ = checkpoints.newest_good(one.run().checkpoints)
    assert newest is not None and newest.step == 8 and newest.state["row"] == 64
    assert newest.state["guard"]["rollbacks"] == 2


@pytest.mark.slow
def test_nan_without_a_checkpoint_from_before_fails_at_once(one: Try):
    one.change = lambda config: setattr(config, "guard", GUARD)
    assert one.child(Fault("update", "loss nan", 1, 10**9)).code == 1
    assert one.told("failed")[-1]["reason"].endswith("there is no checkpoint from before them; try a lower optim.lr")
    assert len(one.told("skip")) == GUARD.max_skips + 1 and not one.told("rollback")


@pytest.mark.slow
def test_a_signal_ends_a_real_compilation(one: Try):
    one.change = lambda config: setattr(config.train, "compile", True)
    ended = one.child(Fault("lowering", "SIGTERM", 2))  # between the lowering of the first graph and its code
    assert ended.code == 75, ended.said
    assert ended.passed["lowering"] == 2  # it did not go on to another graph
    [left] = one.told("preempted")
    assert left["step"] == 0 and left["signal"] == "SIGTERM" and metrics(one.run()) == []


@pytest.mark.slow
def test_the_next_run_compiles_whatever_is_left_of_the_cache(memory_folder: Path, tmp_path: Path):
    warm = WarmCache(memory_folder / "warm")
    assert {".so", ".py", ".cpp", "fxgraph", "aotautograd"} <= warm.kinds.keys()
    for n, kind in enumerate(sorted(warm.kinds)):
        if kind in (".so", ".py"):  # these stop every later run where nobody looks for them
            assert damaged_cache(warm, tmp_path / str(n), n, random.Random(0)) == f"{kind} emptied"


# ---- that it can fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("metrics-1.jsonl", '"segments": ', '"segments": 1', "logged figures differ"),
        ("evals-trainer.jsonl", '"nats_fixed": ', '"nats_fixed": 1', "scores differ"),
        ("events-trainer-1.jsonl", '"done"', '"over"', "not marked as done"),
    ],
)
def test_a_changed_row_is_a_loss(one: Try, straight: RunFolder, file: str, before: str, after: str, message: str):
    shutil.copytree(straight.path, one.runs / straight.path.name)
    one.compare(straight)
    path = one.runs / straight.path.name / file
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(Lost, match=message):
        one.compare(straight)


def test_a_missing_pin_and_a_missing_checkpoint_are_losses(one: Try, straight: RunFolder):
    shutil.copytree(straight.path, one.runs / straight.path.name)
    root = one.runs / straight.path.name / "checkpoints"
    checkpoints.unpin(root, 18, "at-75-percent")
    with pytest.raises(Lost, match="pins differ"):
        one.compare(straight)
    (root / "step-00000024" / "manifest.json").unlink()
    with pytest.raises(Lost, match="the last checkpoint is missing"):
        one.compare(straight)


def test_a_listed_checkpoint_that_is_not_whole_is_a_loss(one: Try, straight: RunFolder):
    shutil.copytree(straight.path, one.runs / straight.path.name)
    weights = one.runs / straight.path.name / "checkpoints" / "step-00000020" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(Lost, match="listed that is not whole"):
        one.listed()
