"""A step replayed as CUDA graphs against the same step launched: every bit, whatever changes from step to step."""

import gc

import pytest
import torch
from torch import Tensor

from dwslm.data.loader import GlobalBatch, TorchBatch
from dwslm.ops.attention import flash4
from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings
from dwslm.train.guard import Guard, GuardSettings
from dwslm.train.recording import no_collection
from dwslm.train.step import SLOTS, TrainStep, slots_needed
from tests.model.small import VOCAB, small_model

CONTEXT, ROWS = 256, 2
TOKENS = CONTEXT * ROWS
MOST_SLOTS = 3 * SLOTS


def boundaries(segments: int, draw: torch.Generator) -> Tensor:
    """Cuts at random places, the rows' ends among them; the slots that are left are empty."""
    cuts = 1 + torch.randperm(TOKENS - 1, generator=draw)[: segments - 1]
    ends = torch.unique(torch.cat([cuts, torch.tensor([0, CONTEXT, TOKENS])]))
    cu_seqlens = torch.full((MOST_SLOTS + 1,), TOKENS, dtype=torch.int32)
    cu_seqlens[: len(ends)] = ends.int()
    return cu_seqlens


def batch(number: int, micro_batches: int = 2) -> GlobalBatch:
    draw = torch.Generator().manual_seed(number)
    made = []
    for turn in range(micro_batches):
        ids = torch.randint(0, VOCAB, (TOKENS,), dtype=torch.int32, generator=draw)
        targets = ids.roll(-1).long()
        targets[:: 7 + turn] = -100
        # 20, 75 or 150 segments: each number of slots is launched, recorded and replayed.
        cu_seqlens = boundaries((20, 75, 150)[(number + turn) % 3], draw)
        made.append(TorchBatch(ids, targets, cu_seqlens, context=CONTEXT, scored=int((targets >= 0).sum())))
    scored = sum(one.scored for one in made)
    return GlobalBatch(made, scored, segments=1, padding=0, first_row=0, next_row=1)


def make_step(record: bool, *, compile: bool = False, **changes) -> TrainStep:
    model = small_model(
        layers=2,
        pattern=["local", "global"],
        width=256,
        heads=2,
        kv_heads=1,
        head_dim=128,
        delta_heads=2,
        delta_head_dim=128,
        mlp_hidden=512,
        dtype="bfloat16",
        **({"depth_block": 2} | changes),
    ).cuda()
    optimizer = Optimizer(
        dict(model.named_parameters()),
        model.roles(),
        OptimSettings(),
        lr=0.02,
        compile=compile,
        extra=model.extra_state(),
    )
    guard = Guard(GuardSettings(window=4, off_for=6), torch.device("cuda"))
    return TrainStep(model, optimizer, ROWS, CONTEXT, MOST_SLOTS, compile=compile, record=record, guard=guard)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# Heads of 128 channels and micro-batches of 512 tokens: with projections in FP8 the convolution's gradient is rounded where it is
# computed, and in "plain-all" what the norms give besides.
@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "changes", [{"local": "kda"}, {"local": "gdn"}, {"local": "window"}, {"mlp_precision": "fp8"},
                {"mlp_precision": "fp8_delayed"}, {"projection_precision": "fp8_delayed"},
                {"local": "gdn", "mlp_precision": "fp8_delayed", "projection_precision": "fp8_delayed"},
                {"depth_block": 0, "mlp_precision": "fp8_delayed", "projection_precision": "fp8_delayed"},
                {"mlp_precision": "fp8_delayed", "mlp_engine": "torch"}, {"head_precision": "fp8_delayed"},
                {"local": "window", "attention_engine": "flash4"}],
    ids=["kda", "gdn", "window", "fp8", "fp8_delayed", "projections", "gdn-all", "plain-all", "fp8-apart", "head", "flash4"],
)  # fmt: skip
def test_replays_give_the_bits_of_launches(deterministic, changes, compile):
    if changes.get("attention_engine") == "flash4" and (reason := flash4.unavailable()):
        pytest.skip(reason)
    steps = [make_step(record, compile=compile, **changes) for record in (True, False)]
    told = []
    for step in steps:
        rows = [torch.stack(step.run(batch(number), 0.02 / (1 + number))) for number in range(50)]
        told.append(torch.stack(rows).cpu())
    assert told[0].isfinite().all() and len(set(told[0][:, 0].tolist())) == 50
    assert torch.equal(told[0], told[1])
    one, other = (step.optimizer.weights() | step.optimizer.state() for step in steps)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert steps[0].guard.state() == steps[1].guard.state()
    recorder = steps[0].recorder
    assert recorder is not None and len(recorder._graphs) == 4 and all(recorder._graphs.values())


@pytest.mark.gpu
@pytest.mark.parametrize("local", ["kda", "gdn", "window"])
def test_replays_are_within_rounding_of_launches_in_the_default_mode(local):
    """There softmax attention may add a gradient's parts up in any order: losses of 50 steps within a thousandth."""
    steps = [make_step(record, compile=True, local=local) for record in (True, False)]
    told = [
        torch.stack([step.run(batch(number), 0.02 / (1 + number))[0].clone() for number in range(50)]) for step in steps
    ]
    off = ((told[0] - told[1]) / told[1]).abs().max().item()
    print(f"{local}: recorded against launched, default mode, 50 steps: {off:.1e}")
    assert off < 1e-3


@pytest.mark.gpu
def test_launched_and_recorded_passes_share_one_pool():
    """A recording beside a launched pass of another number of slots must not need the memory of both."""
    step = make_step(True)
    peaks = []
    for number in range(12):
        step.run(batch(number), 0.01)
        peaks.append(torch.cuda.memory_reserved())
    torch.cuda.empty_cache()
    plain = make_step(False)
    before = torch.cuda.memory_reserved()
    plain.run(batch(0), 0.01)
    assert peaks[-1] - peaks[0] < torch.cuda.memory_reserved() - before + 2**25
    assert peaks[-1] == peaks[6]


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self, of=None):
        self.me, self.of = self, of


@pytest.mark.gpu
def test_an_earlier_step_is_not_freed_within_a_recording():
    """As where the context grows: graphs that only the collector frees, which else would run at every allocation."""
    was = gc.get_threshold()
    try:
        for _ in range(3):
            step = make_step(True)
            gc.set_threshold(1)
            for number in range(6):
                step.run(batch(number), 0.01)
            gc.set_threshold(*was)
            Cycle(step)
            del step
    finally:
        gc.set_threshold(*was)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_before_a_recording_and_not_in_it(enabled):
    class Seen(Cycle):
        def __del__(self):
            freed.append(self.of)

    freed: list[str] = []
    was, on = gc.get_threshold(), gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        Seen("before")
        with pytest.raises(RuntimeError, match="of the recording"), no_collection():
            assert freed == ["before"]
            gc.set_threshold(1)
            Seen("within")
            made = [[] for _ in range(2000)]  # each of which a collector that is on would take as its cue
            assert len(made) == 2000 and freed == ["before"] and not gc.isenabled()
            raise RuntimeError("of the recording")
        assert gc.isenabled() == enabled
        gc.collect()
        assert freed == ["before", "within"]
    finally:
        gc.set_threshold(*was)
        (gc.enable if on else gc.disable)()


def test_slots_are_counted_and_rounded_up():
    draw = torch.Generator().manual_seed(0)
    assert slots_needed(boundaries(20, draw)) == SLOTS
    assert slots_needed(boundaries(75, draw)) == 2 * SLOTS
    assert slots_needed(torch.arange(2 * SLOTS + 1, dtype=torch.int32)) == 2 * SLOTS
    assert slots_needed(torch.arange(2 * SLOTS + 2, dtype=torch.int32)) == 2 * SLOTS + 1  # as many as there are
    many = torch.full((1025,), 700, dtype=torch.int32)
    many[:301] = torch.arange(301)
    assert slots_needed(many) == 8 * SLOTS  # 301 segments: 64, 128, 256, 512
    assert slots_needed(torch.tensor([0, 9, 9, 9], dtype=torch.int32)) == 3


def test_recording_without_a_gpu_is_refused():
    model = small_model()
    optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(), lr=0.1)
    with pytest.raises(ValueError, match=r"train\.record=true needs an NVIDIA GPU"):
        TrainStep(model, optimizer, 1, 32, 4, compile=False, record=True)
    assert TrainStep(model, optimizer, 1, 32, 4, compile=True, record=None).recorder is None


@pytest.mark.slow
def test_another_number_of_slots_is_no_other_program():
    model = small_model(layers=1, pattern=["global"], depth_block=2)
    optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(), lr=0.1)
    step = TrainStep(model, optimizer, ROWS, CONTEXT, MOST_SLOTS, compile=True)
    plain = TrainStep(model, optimizer, ROWS, CONTEXT, MOST_SLOTS, compile=False)
    for number in range(3):  # a second compilation would raise
        loss, _ = step.run(batch(number), 0.0)
        assert loss.item() == pytest.approx(plain.run(batch(number), 0.0)[0].item(), rel=1e-5)
