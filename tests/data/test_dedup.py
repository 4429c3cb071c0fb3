import hashlib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dwslm.data.dedup
from dwslm.data.dedup import KeySet, repeated, text_hash

KEYS = st.lists(st.integers(0, 2**64 - 1) | st.integers(1, 20), max_size=60)


@given(st.lists(KEYS, max_size=8))
def test_keys_are_new_once(batches):
    seen, keys = set(), KeySet()
    for batch in batches:
        expected = []
        for key in batch:
            expected.append(max(key, 1) not in seen)
            seen.add(max(key, 1))
        assert keys.add(np.array(batch, np.uint64)).tolist() == expected


def test_many_keys_through_growth():
    draw = np.random.default_rng(0)
    keys = KeySet()
    every = draw.integers(1, 2**64, 60_000, dtype=np.uint64)
    for part in np.array_split(every, 13):
        assert keys.add(part).all()
    assert not keys.add(every).any()
    # Keys that all want the same slot.
    crowd = (np.arange(1, 2000, dtype=np.uint64) << np.uint64(32)) ^ np.arange(1, 2000, dtype=np.uint64)
    assert keys.add(crowd).all() and not keys.add(crowd).any()


def test_too_many_keys(monkeypatch):
    monkeypatch.setattr(dwslm.data.dedup, "MAX_KEYS", 100)
    keys = KeySet("documents")
    keys.add(np.arange(1, 101, dtype=np.uint64))
    keys.add(np.arange(1, 101, dtype=np.uint64))
    with pytest.raises(ValueError, match=r"more than 100 documents in one call of prepare; prepare in pieces"):
        keys.add(np.array([101], np.uint64))


@pytest.mark.parametrize("per_pass", [7, 1000])
def test_repeated_finds_all_but_the_first(monkeypatch, per_pass):
    monkeypatch.setattr(dwslm.data.dedup, "_PASS_KEYS", per_pass)
    draw = random.Random(1)
    pool = [draw.getrandbits(64) for _ in range(60)]
    keys = [draw.choice(pool) for _ in range(200)]
    batches = [np.array(part, np.uint64) for part in (keys[:50], [], keys[50:51], keys[51:])]
    found = sorted(place for places in repeated(lambda: batches, len(keys)) for place in places.tolist())
    assert found == [place for place, key in enumerate(keys) if key in keys[:place]]
    assert [places.tolist() for places in repeated(lambda: [], 0)] == []


def test_text_hash_is_blake2b_of_its_own_kind():
    digest = hashlib.blake2b("é".encode(), digest_size=8, person=b"text").digest()
    assert text_hash("é") == int.from_bytes(digest, "little")
