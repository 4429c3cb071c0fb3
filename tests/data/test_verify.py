"""Every kind of damage is found, also by what checksums cannot see."""

import hashlib
import json

import numpy as np
import pytest

import dwslm.data.verify
from dwslm.data.inspect import find_datasets
from dwslm.data.prepare import prepare
from dwslm.data.verify import verify
from tests.data.prepare_case import records, settings, write_jsonl


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(dwslm.data.verify, "_BLOCK_TOKENS", 300)
    text = write_jsonl(tmp_path / "t.jsonl", records(100)), write_jsonl(tmp_path / "v.jsonl", records(20, "v"))
    prepare(settings(tmp_path / "out", text))
    return tmp_path / "out"


def faults(path):
    return verify(find_datasets(path))


def resign(folder, change=None):
    """Write checksums of the files as they are: what an honest mistake of a writer would look like."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for shard in manifest["shards"]:
        for kind, name in (("bin", f"{shard['name']}.bin"), ("docs", f"{shard['name']}.docs.npy")):
            shard[f"{kind}_sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    if change is not None:
        change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edit(path, change):
    values = np.load(path) if path.suffix == ".npy" else np.fromfile(path, "<u2")
    change(values)
    if path.suffix == ".npy":
        np.save(path, values)
    else:
        values.tofile(path)


def test_a_whole_dataset(prepared):
    seen = []
    found = find_datasets(prepared)
    assert verify(found, lambda *state: seen.append(state)) == []
    assert seen[-1][0] == "valid" and seen[-1][2] == 1.0
    assert verify({"train": found["train"]}) == []


def test_missing_short_and_altered_files(prepared):
    (prepared / "train" / "00000.bin").unlink()
    with (prepared / "train" / "00001.bin").open("r+b") as file:
        file.truncate(10)
    edit(prepared / "valid" / "00000.bin", lambda tokens: tokens.__setitem__(0, tokens[0] ^ 1))
    lines = faults(prepared)
    assert any(line.endswith("00000.bin is missing") for line in lines)
    assert any("00001.bin has 10 bytes, the manifest says" in line for line in lines)
    assert any("valid/00000.bin is altered: its sha256" in line for line in lines)


def test_a_token_that_stands_for_other_bytes(prepared):
    docs = np.load(prepared / "train" / "00001.docs.npy")
    tokens = np.fromfile(prepared / "train" / "00001.bin", "<u2")
    place = next(i for i in range(int(docs["start"][2]), len(tokens)) if tokens[i] > 256)  # a merge: two bytes or more
    document = int(np.searchsorted(docs["start"], place, side="right")) - 1
    edit(prepared / "train" / "00001.bin", lambda all_: all_.__setitem__(place, 5))  # a single byte
    resign(prepared / "train")
    (line,) = faults(prepared)
    assert line.endswith(f"train/00001: 1 documents ({document}) whose tokens stand for other than the table's bytes")


@pytest.mark.parametrize("token", [0, 300, 65535])
def test_special_tokens_and_ids_outside_the_vocabulary(prepared, token):
    edit(prepared / "train" / "00000.bin", lambda tokens: tokens.__setitem__(0, token))
    resign(prepared / "train")
    assert any("00000: 1 documents (0) with special tokens or ids outside" in line for line in faults(prepared))


def test_tables_and_totals(prepared):
    edit(prepared / "train" / "00000.docs.npy", lambda docs: docs["start"].__setitem__(1, 1))
    resign(prepared / "train")
    assert any("00000.docs.npy is altered: it does not agree" in line for line in faults(prepared))


def test_slices_that_are_not_those_of_the_documents(prepared):
    edit(prepared / "train" / "00000.docs.npy", lambda docs: docs["source"].__setitem__(0, 1 - docs["source"][0]))
    resign(prepared / "train")
    lines = faults(prepared)
    assert len(lines) == 2 and all("slice" in line and "the manifest says" in line for line in lines)


def test_totals_of_the_manifest(prepared):
    resign(prepared / "train", lambda manifest: manifest["totals"].__setitem__("bytes", 1))
    (line,) = faults(prepared)
    assert "the manifest says {'documents': 100" in line


def test_a_held_out_id_in_training(prepared):
    wanted = np.load(prepared / "valid" / "00000.docs.npy")["id_hash"][3]
    edit(prepared / "train" / "00000.docs.npy", lambda docs: docs["id_hash"].__setitem__(0, wanted))
    resign(prepared / "train")
    assert faults(prepared) == ["1 documents have the id of another (in one dataset, or held out and trained on)"]
    assert verify({"train": prepared / "train"}) == []
