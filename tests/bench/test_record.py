"""Replays are compared with unrecorded runs. A recording is anything over fixed buffers, so a CPU can show a stale one."""

import pytest
import torch

from dwslm.bench.case import draw_upstream, values_and_gradients
from dwslm.bench.record import check_padding, check_replay
from dwslm.ops.segments import segments
from tests.bench.tiny import attention_case, conv_case, delta_case, right

TOKENS, CONTEXT = 32, 32
BOUNDARIES = ([0, 5, 32, 32, 32], [0, 1, 20, 25, 32], [0, 32, 32, 32, 32])
CASES = [attention_case, conv_case, delta_case]


def faithful(step):
    """A perfect recording: replaying runs the step on what the buffers hold."""
    return step


def prepare(make):
    case = make()
    run = right(case)
    generator = torch.Generator().manual_seed(0)
    batches = [
        (case.draw(TOKENS, case.kinds[0], generator), torch.tensor(offsets, dtype=torch.int32))
        for offsets in BOUNDARIES
    ]
    first = segments(batches[0][1], TOKENS, CONTEXT)
    upstream = draw_upstream(run(batches[0][0], first), case.dtype, generator)

    def step(inputs, cu_seqlens, run=run):
        return values_and_gradients(case, run, inputs, segments(cu_seqlens, TOKENS, CONTEXT), upstream)

    return case, step, batches


@pytest.mark.parametrize("make", CASES)
def test_a_faithful_recording_equals_the_unrecorded_run(make):
    _, step, batches = prepare(make)
    assert check_replay(faithful, step, batches) == []


@pytest.mark.parametrize("make", CASES)
def test_stale_boundaries_on_replay_are_caught(make):
    """What a table of chunks kept by the boundaries' identity does: the first batch's boundaries for ever."""
    case, step, batches = prepare(make)
    kept = []

    def stale(inputs, cu_seqlens):
        kept.append(cu_seqlens.clone())
        return step(inputs, kept[0])

    def recorder(recorded_step):
        kept.clear()
        return recorded_step

    def unrecorded_is_right(inputs, cu_seqlens):
        in_buffers = cu_seqlens.data_ptr() not in {batch[1].data_ptr() for batch in batches}
        return stale(inputs, cu_seqlens) if in_buffers else step(inputs, cu_seqlens)

    differences = check_replay(recorder, unrecorded_is_right, batches)
    # Batch 2 is the first to be replayed: right for it, and for nothing after it.
    assert {f"{case.outputs[0]} on batch {i}" for i in (3, 1)} <= set(differences)
    assert not any("batch 2" in difference for difference in differences)


@pytest.mark.parametrize("make", CASES)
def test_stale_inputs_on_replay_are_caught(make):
    case, step, batches = prepare(make)

    def recorder(recorded_step):
        values = recorded_step()
        return lambda: values  # replays nothing: the graph reads memory that nobody fills

    differences = check_replay(recorder, step, batches)
    assert {f"{case.outputs[0]} on batch {i}" for i in (2, 3)} <= set(differences)
    assert not any("batch 1" in difference for difference in differences)


def test_the_first_batch_comes_last_so_that_going_back_is_seen():
    _, step, batches = prepare(attention_case)
    seen = []

    def recorder(recorded_step):
        def replay():
            seen.append(1)
            # Right for two batches, then stuck.
            return recorded_step() if len(seen) < 3 else {name: x * 2 for name, x in recorded_step().items()}

        return replay

    differences = check_replay(recorder, step, batches)
    assert differences and all("batch 1" in difference for difference in differences)


@pytest.mark.parametrize("make", CASES)
def test_padding_changes_no_bit_and_an_engine_that_minds_is_caught(make):
    case, step, batches = prepare(make)
    assert check_padding(step, batches[0], 7) == []

    def minds(inputs, cu_seqlens):
        found = step(inputs, cu_seqlens)
        # Splits work by the number of slots, and sums in another order.
        return found | {case.outputs[0]: found[case.outputs[0]] * (1 + 1e-7 * len(cu_seqlens))}

    assert check_padding(minds, batches[0], 7) == [case.outputs[0]]


def test_fewer_than_three_batches_are_no_check():
    _, step, batches = prepare(attention_case)
    with pytest.raises(AssertionError):
        check_replay(faithful, step, batches[:2])
