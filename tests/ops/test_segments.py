import pytest
import torch

from dwslm.ops.segments import segments


def test_hand_computed_ids_and_positions_with_empty_segments():
    seg = segments(torch.tensor([0, 0, 3, 3, 4, 8, 8, 8], dtype=torch.int32), 8, context=4)
    assert seg.ids.tolist() == [1, 1, 1, 3, 4, 4, 4, 4]
    assert seg.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert seg.rows == 2


def test_a_context_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="8 tokens is not a whole number of rows of 3"):
        segments(torch.tensor([0, 8], dtype=torch.int32), 8, context=3)
