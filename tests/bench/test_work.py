import numpy as np
import pytest

from dwslm.bench.work import describe, describe_documents, make_work, with_slots
from dwslm.data.shards import open_dataset


@pytest.fixture(scope="module")
def dataset(tiny_data):
    return open_dataset(tiny_data / "train")


def test_batches_are_real_documents_with_one_number_of_slots(dataset):
    work = make_work(dataset, 1024, 256, seed=1, batches=3)
    assert len(work.cu_seqlens) == 3 and work.rows == 4
    assert {len(cu) for cu in work.cu_seqlens} == {work.slots + 1}
    for i, (cu, targets) in enumerate(zip(work.cu_seqlens, work.targets, strict=True)):
        assert cu[0] == 0 and cu[-1] == 1024 and (np.diff(cu) >= 0).all() and cu.dtype == np.int32
        assert set(range(0, 1025, 256)) <= set(cu.tolist())  # no segment crosses a row
        assert work.lengths(i).sum() == 1024 and work.lengths(i).max() <= 256
        assert targets.shape == (1024,) and (targets >= 0).mean() > 0.8
    assert not np.array_equal(work.cu_seqlens[0], work.cu_seqlens[1])
    # A segment is an opening token and a document, or a piece of one that is longer than a row: 255 tokens or what is left. The
    # ends of a packing window cut a few more.
    tokens = dataset.docs["tokens"].astype(int)
    possible = {256} | set((1 + np.where(tokens % 255, tokens % 255, 255)).tolist())
    assert np.mean([n in possible for n in work.text.tolist()]) > 0.8


def test_the_batch_that_is_timed_is_the_one_in_the_middle(dataset):
    work = make_work(dataset, 512, 256, seed=3, batches=3)
    squares = [int((work.lengths(i) ** 2).sum()) for i in range(3)]
    assert len(set(squares)) == 3 and sorted(squares)[1] == squares[0]


def test_the_seed_decides_the_batches(dataset):
    one, same, other = (make_work(dataset, 512, 256, seed, 1) for seed in (1, 1, 2))
    assert np.array_equal(one.cu_seqlens[0], same.cu_seqlens[0])
    assert not np.array_equal(one.targets[0], other.targets[0])


def test_tokens_that_are_no_whole_rows_are_refused(dataset):
    with pytest.raises(ValueError, match="1000 tokens are not a whole number of rows of 256"):
        make_work(dataset, 1000, 256, 0, 1)


def test_more_slots_are_empty_segments_at_the_end():
    cu = np.array([0, 3, 3, 10, 10], dtype=np.int32)
    assert with_slots(cu, 5).tolist() == [0, 3, 10, 10, 10, 10]
    assert with_slots(cu, 2).tolist() == [0, 3, 10]


def test_statistics_by_another_count(dataset):
    work = make_work(dataset, 1024, 256, seed=1, batches=2)
    told = describe(work)
    text = sorted(work.text.tolist())
    assert told["lengths"]["min"] == text[0] and told["lengths"]["max"] == text[-1]
    assert told["lengths"]["mean"] == pytest.approx(sum(text) / len(text))
    full = sum(n for n in text if n == 256) / sum(text)
    assert told["lengths"]["share_of_tokens_at_context"] == pytest.approx(full)
    assert told["segments"] == [len(set(cu.tolist())) - 1 for cu in work.cu_seqlens]
    assert told["padding_share"] == pytest.approx(1 - sum(text) / 2048)
    documents = describe_documents(dataset, [64, 256])
    tokens = dataset.docs["tokens"]
    assert documents["documents"] == len(tokens) and documents["tokens"] == tokens.sum()
    assert documents["share_of_tokens_in_long"] == pytest.approx(tokens[tokens >= 256].sum() / tokens.sum())
