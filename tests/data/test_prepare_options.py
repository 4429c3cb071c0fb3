"""What the options leave out, and that they say so."""

import json
from pathlib import Path

import pytest

from dwslm.data.prepare import prepare, prepare_tokenizer
from dwslm.data.shards import id_hash, open_dataset
from dwslm.data.tokenizer import load_tokenizer
from tests.data.prepare_case import contents, records, settings, write_jsonl

RUN = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.fixture
def text(tmp_path):
    """300 long documents to learn a tokenizer from, and a dozen that are told apart below; held out are four."""
    rows = [{**row, "text": row["text"] + " and so it goes on"} for row in records(300)]
    special = {
        "first": "a text that occurs again, word for word",
        "again": "a text that occurs again, word for word",
        "case": "A text that occurs again, word for word",
        "short": "ab",
        "enough": "abc",
        "controls": "\ufeffbell\x07 and\x00 tab\tkept\x85",
        "only controls": "\x07\x08x\x07"[:2],
        "copied": "the held-out text itself",
        "half": f"{RUN} a b c d e f g h i j k l m",  # 26 words, 14 runs, one of them held out
        "whole": RUN,
    }
    rows += [{**rows[0], "id": name, "text": content} for name, content in special.items()]
    held = [{**rows[0], "id": f"v{i}", "text": t} for i, t in enumerate([f"{RUN} z", "the held-out text itself"])]
    held += [{**rows[0], "id": "v2", "text": "ab"}, {**rows[0], "id": "v3", "text": "the held-out text itself"}]
    return write_jsonl(tmp_path / "train.jsonl", rows), write_jsonl(tmp_path / "valid.jsonl", held)


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").split("\n")[:-1]]


def left_out(tmp_path, text, **options):
    """Ids that are not there with these options, and the report."""
    summary = prepare(settings(tmp_path / "out", text, workers=1, **options))
    missing = []
    for split, path in zip(("train", "valid"), text, strict=True):
        there = set(open_dataset(tmp_path / "out" / split).docs["id_hash"].tolist())
        ids = [row["id"] for row in rows_of(path)]
        missing += [name for name in ids if id_hash(name) not in there]
    assert json.loads((tmp_path / "out" / "prepare.json").read_bytes()).get("report", {}) == summary["report"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["prepare.json", "tokenizer.json", "train", "valid"]
    return missing, summary["report"]


@pytest.mark.parametrize("size", [-1, 0, 10, 256, 2**31 + 1, 100_000_000_000])
def test_a_vocabulary_of_an_impossible_size_is_refused_before_anything_is_read(tmp_path, size):
    bound = "257 .* or more" if size < 257 else "2147483648 or less"
    with pytest.raises(ValueError, match=f"^vocab_size={size} must be {bound}"):
        settings(tmp_path / "out", ("nowhere.jsonl", "nowhere.jsonl"), vocab_size=size)


@pytest.mark.parametrize("size", [258 + 10, 2**31])
def test_a_vocabulary_of_more_entries_than_the_text_has_bytes_is_refused_before_the_training(tmp_path, text, size):
    rows = [{**rows_of(text[0])[0], "text": "ten bytes!"}]
    few = write_jsonl(tmp_path / "few.jsonl", rows)
    with pytest.raises(
        ValueError, match=f"vocab_size={size}: the 10 bytes of training text can't give so many entries"
    ):
        prepare(settings(tmp_path / "out", (few, text[1]), vocab_size=size))


@pytest.mark.parametrize("make", [prepare, prepare_tokenizer])
@pytest.mark.parametrize("rows", [0, 3])
def test_training_text_of_which_nothing_is_left_is_told_as_such(tmp_path, text, make, rows):
    empty = write_jsonl(tmp_path / "empty.jsonl", [{**row, "text": " "} for row in rows_of(text[0])[:rows]])
    with pytest.raises(ValueError, match="out: no document for the train split; give some"):
        make(settings(tmp_path / "out", (empty, text[1]), skip_bad=3))


def test_nothing_is_left_out_unasked(tmp_path, text):
    assert left_out(tmp_path, text) == ([], {})


def test_short_documents(tmp_path, text):
    missing, report = left_out(tmp_path, text, min_characters=3)
    assert missing == ["short", "only controls", "v2"]
    assert report == {
        "left_out": {"short": {"train": {"documents": 2, "bytes": 4}, "valid": {"documents": 1, "bytes": 2}}}
    }


def test_control_characters(tmp_path, text):
    missing, report = left_out(tmp_path, text, strip_control=True)
    assert missing == ["only controls"]
    assert report["control_characters"] == {"documents": 2, "characters": 6}
    assert report["left_out"]["short"]["train"] == {"documents": 1, "bytes": 0}
    data = open_dataset(tmp_path / "out" / "train")
    index = data.docs["id_hash"].tolist().index(id_hash("controls"))
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert tokenizer.decode(data.tokens(index).tolist()) == "bell and tab\tkept"
    assert data.docs["bytes"][index] == len("bell and tab\tkept")


def test_duplicates(tmp_path, text):
    missing, report = left_out(tmp_path, text, dedup=True)
    # "copied" goes, not the held-out text that it copies; "short" is a copy of v2.
    assert missing == ["again", "short", "copied", "v3"]
    assert report["left_out"]["duplicate"] == {
        "train": {"documents": 1, "bytes": 39},
        "valid": {"documents": 1, "bytes": 24},
    }
    assert report["left_out"]["duplicate_of_held_out"]["train"] == {"documents": 2, "bytes": 26}


def test_overlap_is_reported(tmp_path, text):
    missing, report = left_out(tmp_path, text, decontaminate="report")
    assert missing == [] and "left_out" not in report
    overlap = report["overlap"]
    assert overlap["held_out_runs"] == 2  # v0 has 14 words
    assert overlap["documents"] == {"any": 2, "0.1": 1, "0.5": 1, "0.9": 1}
    assert overlap["bytes"]["0.9"] == len(RUN) and overlap["bytes"]["any"] == 2 * len(RUN) + 26
    assert overlap["sources"] == {records(1)[0]["source"]: 2}
    assert overlap["examples"] == [{"id": "half", "held_out": 1, "runs": 14}, {"id": "whole", "held_out": 1, "runs": 1}]


@pytest.mark.parametrize(("share", "gone"), [(0.5, ["whole"]), (0.0, ["half", "whole"]), (0.08, ["whole"])])
def test_overlap_is_removed(tmp_path, text, share, gone):
    missing, report = left_out(tmp_path, text, decontaminate="remove", overlap_share=share)
    assert missing == gone
    assert report["left_out"]["overlap"]["train"]["documents"] == len(gone)
    assert report["overlap"]["documents"]["any"] == 2


def test_held_out_by_fraction_is_compared_with_all_training_text(tmp_path, text):
    """Before the first training document is looked at, whichever comes first in the text."""
    options = {"valid": [], "valid_fraction": 0.2, "dedup": True, "decontaminate": "report"}
    rows = rows_of(text[0])[:300]
    plain = settings(tmp_path / "plain", text, valid=[], valid_fraction=0.2)
    prepare(plain)
    held_out = set(open_dataset(tmp_path / "plain" / "valid").docs["id_hash"].tolist())
    trained = [row for row in rows if id_hash(row["id"]) not in held_out]
    last = next(row for row in rows[::-1] if id_hash(row["id"]) in held_out and len(row["text"].split()) > 30)
    trained[0]["text"] = last["text"]
    trained[1]["text"] = last["text"] + " and more"
    path = write_jsonl(tmp_path / "changed.jsonl", rows)
    summary = prepare(settings(tmp_path / "out", (path, ""), **options))
    report = summary["report"]
    assert report["left_out"]["duplicate_of_held_out"]["train"]["documents"] == 1
    assert {example["id"] for example in report["overlap"]["examples"]} >= {trained[0]["id"], trained[1]["id"]}


def test_options_are_part_of_what_made_a_dataset(tmp_path, text):
    prepare(settings(tmp_path / "out", text))
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=r"made otherwise \(settings\.dedup: None there, True now\)"):
        prepare(settings(tmp_path / "out", text, dedup=True))
    assert prepare(settings(tmp_path / "out", text, workers=3, overlap_share=0.1))["already_complete"]
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "workers=0"),
        ({"min_characters": -1}, "min_characters=-1"),
        ({"decontaminate": "yes"}, "decontaminate='yes'"),
        ({"overlap_share": 1.5}, r"overlap_share=1\.5"),
        ({"piece": "0/3", "tokenizer": "t"}, "piece='0/3'"),
        ({"piece": "4/3", "tokenizer": "t"}, "piece='4/3'"),
        ({"piece": "a", "tokenizer": "t"}, "piece='a'"),
        ({"piece": "1/3"}, "--piece 1/3 without --tokenizer"),
    ],
)
def test_options_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        settings("x", ("a.jsonl", "b.jsonl"), **changes)
