"""The number of workers makes no difference, and what goes wrong in one is said in one line."""

import pytest
from tokenizers import Tokenizer, pre_tokenizers

import dwslm.data.lines
import dwslm.data.workers
from dwslm.data.prepare import prepare, prepare_tokenizer
from dwslm.data.readers import FieldSettings
from dwslm.data.shards import open_dataset
from tests.data.prepare_case import contents, records, settings, write_jsonl


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setattr(dwslm.data.lines, "CHUNK_BYTES", 3000)
    train = write_jsonl(tmp_path / "train.jsonl.gz", records(300))
    return train, write_jsonl(tmp_path / "valid.jsonl", records(40, "v"))


def test_1_2_and_4_workers_give_the_same_bytes(tmp_path, text):
    options = {"dedup": True, "strip_control": True, "decontaminate": "report"}
    made = []
    for workers in (1, 2, 4):
        out = tmp_path / f"out{workers}"
        prepare(settings(out, text, workers=workers, fields=FieldSettings(licence_field="license"), **options))
        made.append(contents(out))
    assert made[0] == made[1] == made[2]
    assert len(open_dataset(tmp_path / "out4" / "train")) == 300


def test_progress_goes_from_nothing_to_all(tmp_path, text):
    seen = []
    summary = prepare(settings(tmp_path / "out", text, workers=2), seen.append)
    done = [state for state in seen if state.stage == "tokenize"]
    assert len(done) > 10
    shares = [state.share for state in done]
    assert shares == sorted(shares) and shares[0] < 0.6 and shares[-1] == 1.0
    assert done[-1].documents == 340
    assert done[-1].bytes == summary["train"]["bytes"] + summary["valid"]["bytes"]


def test_bad_documents_are_listed_in_the_order_of_the_text(tmp_path, text):
    rows = records(300)
    rows[17]["text"] = ""
    rows[180]["id"] = "t3"
    rows[181]["text"] = None
    rows[290]["id"] = "t200"
    path = write_jsonl(tmp_path / "bad.jsonl", rows)
    listed = []
    for workers in (1, 3):
        out = tmp_path / f"out{workers}"
        summary = prepare(settings(out, (path, text[1]), workers=workers, skip_bad=4))
        listed.append([(bad["place"].rpartition(":")[2], bad["reason"]) for bad in summary["bad"]])
    assert listed[0] == listed[1]
    assert [line for line, _ in listed[0]] == ["18", "181", "182", "291"]
    assert listed[0][1][1] == f"id 't3' is already taken by {path}:4"
    with pytest.raises(ValueError, match=r"bad\.jsonl:291: id 't200'.*and 3 bad documents before it"):
        prepare(settings(tmp_path / "out", (path, text[1]), workers=2, skip_bad=3))


def test_an_error_in_a_worker_names_the_document(tmp_path, text):
    prepare_tokenizer(settings(tmp_path / "tokenizer.json", text))
    adding = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    adding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    adding.save(str(tmp_path / "adding.json"))
    wrong = settings(tmp_path / "out", text, vocab_size=None, tokenizer=str(tmp_path / "adding.json"), workers=2)
    with pytest.raises(ValueError, match=r"train\.jsonl\.gz:1: its tokens stand for .* adds or loses text"):
        prepare(wrong)


def test_a_worker_that_dies_is_an_error_with_a_way_out(tmp_path, text, monkeypatch):
    send = dwslm.data.workers._send
    calls = []

    def send_and_kill(pipe, head, payload):
        calls.append(head)
        send(pipe, head, payload)
        if len(calls) >= 6:  # two threads may have counted before either looks
            pool[0]._processes[1].kill()

    pool = []
    made = dwslm.data.workers._Pool.__init__
    monkeypatch.setattr(
        dwslm.data.workers._Pool, "__init__", lambda self, *given: pool.append(self) or made(self, *given)
    )
    monkeypatch.setattr(dwslm.data.workers, "_send", send_and_kill)
    prepare_tokenizer(settings(tmp_path / "tokenizer.json", text, workers=1))
    given = {"vocab_size": None, "tokenizer": str(tmp_path / "tokenizer.json")}
    with pytest.raises(ChildProcessError, match=r"killed by signal 9; if memory was short, give fewer --workers"):
        prepare(settings(tmp_path / "out", text, workers=2, **given))
    assert all(process.returncode is not None for process in pool[0]._processes)
    monkeypatch.undo()
    monkeypatch.setattr(dwslm.data.lines, "CHUNK_BYTES", 3000)
    prepare(settings(tmp_path / "out", text, workers=2, **given))
    prepare(settings(tmp_path / "straight", text, workers=1, **given))
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_a_worker_that_refuses_before_it_has_read_all_is_heard():
    with pytest.raises(ValueError, match="vocab_size=10 must be 257"):
        dwslm.data.workers.train_elsewhere(["text " * 100_000] * 20, 10)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, r"a worker of prepare ended without a reply\. Run the same"),
        (3, r"ended with code 3, see above; if memory was short, give a smaller --tokenizer-bytes\. Run the same"),
    ],
)
def test_a_worker_without_a_reply_is_told_as_it_ended(monkeypatch, code, said):
    monkeypatch.setattr(dwslm.data.workers, "_START", f"raise SystemExit({code})  # {{0}} {{name}}")
    with pytest.raises(ChildProcessError, match=said):
        dwslm.data.workers.train_elsewhere(["text"], 300)


def test_the_tokenizer_alone_is_that_of_the_whole(tmp_path, text):
    whole = settings(tmp_path / "whole", text, valid=[], valid_fraction=0.3, workers=1)
    prepare(whole)
    made = prepare_tokenizer(settings(tmp_path / "one.json", text, valid=[], valid_fraction=0.3, workers=3))
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "whole" / "tokenizer.json").read_bytes()
    assert made["tokenizer_hash"] == open_dataset(tmp_path / "whole" / "train").tokenizer_hash
    (tmp_path / "one.json").write_text("something else")
    with pytest.raises(ValueError, match=r"one\.json is there already"):
        prepare_tokenizer(settings(tmp_path / "one.json", text, workers=1))
