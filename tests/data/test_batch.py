import numpy as np
import pytest

from dwslm.data.batch import IGNORE, assemble
from dwslm.data.order import Pieces
from tests.data.in_memory import EOD, dataset


def row(*pieces: tuple[int, int, int]) -> Pieces:
    docs, starts, lengths = np.array(pieces, dtype=np.int64).T
    return Pieces(docs, starts, lengths)


def test_batch_by_hand() -> None:
    text = dataset([("a", 7), ("a", 2), ("b", 1)])  # tokens 1..7, 8..9, 10
    batch = assemble(text, [row((1, 0, 2), (2, 0, 1)), row((0, 0, 5)), row((0, 5, 2), (1, 0, 2))], 6, 3)
    e, x = EOD, IGNORE
    assert batch.tokens.tolist() == [e, 8, 9, e, 10, e, e, 1, 2, 3, 4, 5, e, 6, 7, e, 8, 9]
    # Documents 1 and 2 end, one slot of padding; document 0 goes on; it ends, and so does document 1.
    assert batch.targets.tolist() == [8, 9, e, 10, e, x, 1, 2, 3, 4, 5, x, 6, 7, e, 8, 9, e]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6, 12, 15, 18, 18, 18, 18]
    assert batch.docs.tolist() == [1, 2, -1, 0, 0, 1, -1, -1, -1]
    assert batch.starts.tolist() == [0, 0, 0, 0, 5, 0, 0, 0, 0]
    assert (batch.tokens.dtype, batch.targets.dtype, batch.cu_seqlens.dtype) == (np.int32, np.int32, np.int32)
    assert (batch.docs.dtype, batch.starts.dtype) == (np.int64, np.int64)
    assert (batch.context, batch.scored, batch.segments, batch.padding) == (6, 16, 5, 1)


def test_a_target_is_never_taken_from_the_next_row_or_segment() -> None:
    text = dataset([("a", 9)])
    batch = assemble(text, [row((0, 0, 2), (0, 2, 2)), row((0, 4, 5))], 6, 2)
    assert batch.targets.tolist() == [1, 2, IGNORE, 3, 4, IGNORE, 5, 6, 7, 8, 9, EOD]


def test_rows_that_do_not_fit_are_refused() -> None:
    text = dataset([("a", 9)])
    with pytest.raises(ValueError, match="6 slots in 3 segments"):
        assemble(text, [row((0, 0, 6))], 6, 3)
    with pytest.raises(ValueError, match="5 slots in 2 segments"):
        assemble(text, [row((0, 0, 1), (0, 1, 1))], 5, 2)  # no segment is left for the slot of padding


@pytest.mark.parametrize("foreign", [13, 2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize(("doc", "shard"), [(0, 0), (1, 0), (3, 1)])
def test_a_token_past_the_vocabulary_is_told_with_its_document_and_shard(foreign: int, doc: int, shard: int) -> None:
    text = dataset([("a", 3)] * 4, shards=2)  # a vocabulary of 13
    rows = [row((0, 0, 3), (2, 0, 3)), row((3, 0, 3), (1, 0, 3))]
    assert assemble(text, rows, 9, 3).tokens.max() == 12
    text.tokens(doc)[-1] = foreign
    with pytest.raises(ValueError, match=f"^memory: document {doc}, in shard 0000{shard}.bin, holds a token id past the "
                       "vocabulary of 13.*data.verify=sha256"):  # fmt: skip
        assemble(text, rows, 9, 3)
