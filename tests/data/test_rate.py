from dwslm.data.prepare import prepare_tokenizer
from dwslm.data.rate import rates
from dwslm.data.readers import FieldSettings
from tests.data.prepare_case import records, settings, write_jsonl


def test_three_ways_over_the_same_text(tmp_path):
    text = write_jsonl(tmp_path / "t.jsonl", records(200)), write_jsonl(tmp_path / "v.jsonl", records(1, "v"))
    prepare_tokenizer(settings(tmp_path / "tokenizer.json", text))
    turns = []
    found = rates([text[0]], str(tmp_path / "tokenizer.json"), FieldSettings(), 0.02, 2, turns.append)
    assert [rate.name for rate in found] == ["tokenizers encode_batch", "dwslm prepare", "pool of encode"]
    assert len(turns) == 6
    assert len({rate.megabytes for rate in found}) == 1 and 0.04 <= found[0].megabytes < 0.042
    assert all(rate.seconds > 0 and rate.cpu_seconds > 0 for rate in found)
