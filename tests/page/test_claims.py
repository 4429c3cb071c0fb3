"""Each earlier finding has a rule, and the rule's answer follows the numbers."""

import pytest

from dwslm.page.bench_claims import answers
from dwslm.page.bench_file import join
from dwslm.page.claim_rules_dense import RULES
from dwslm.page.claims import CLAIMS
from tests.page.bench_json import find, report, save, stat


def told(tmp_path, data):
    return {claim.name: answer for claim, answer in answers(join([save(tmp_path, data)]))}


def test_every_claim_has_its_own_name_and_a_rule_and_every_rule_is_used():
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert {claim.rule for claim in CLAIMS} == set(RULES)
    assert all(claim.says.endswith(".") and claim.theirs and claim.test for claim in CLAIMS)


def test_an_empty_report_answers_nothing(tmp_path):
    found = told(tmp_path, {"format": 1, "rows": []})
    assert {name for name, answer in found.items() if answer.verdict != "not measured"} == set()
    assert all(answer.why for answer in found.values())


def test_a_full_report_answers_all_that_a_benchmark_can(tmp_path):
    found = told(tmp_path, report())
    assert {name for name, answer in found.items() if answer.verdict == "not measured"} == {
        "cap-cost",
        "loss",
        "torch-cudnn",
    }
    assert all(answer.ours and answer.why for answer in found.values() if answer.verdict != "not measured")


def change(op, case, engine, context=None, **changes):
    def apply(data):
        find(data, op, case, engine, context).update(changes)

    return apply


def every_mask_dear(data):
    for row in data["rows"]:
        if row["engine"] == "flex":
            row["extra_ms"] = {"mask": stat(9.0)}


def capped_and_whole(data):
    data["machine"]["clock_cap_mhz"] = 1500


def cut_off(data):
    data["complete"] = False


def slow_contexts(data):
    find(data, "delta_rule", "kda", "fla", 512)["forward_backward_ms"] = stat(1.0)


def wider_heads_free(data):
    for row in data["rows"]:
        if row["heads"] == 16:
            row["forward_backward_ms"] = stat(1.5)


def slow_fla(data):
    for row in data["rows"]:
        if row["engine"] == "fla" and row["heads"] == 8:
            row["forward_backward_ms"] = stat(20.0)


def gdn_dearest(data):
    for row in data["rows"]:
        if row["case"] == "gdn" and row["status"] == "ok" and row["heads"] == 8:
            row["forward_backward_ms"] = stat(9.0)


def found_empty_files(data):
    data["stability"]["cache"]["moved_aside"] = [{"from": "a", "to": "b", "empty": ["c", "d"]}]


def records_after_all(data):
    for row in data["rows"]:
        if row["engine"] == "cudnn" and row["op"] == "attention" and row["record"]:
            row["record"]["status"] = "ok"


def fla_fails_to_record(data):
    find(data, "delta_rule", "kda", "fla", 4096)["record"].update(status="fails", reason="split")


FLIPS = [
    ("documents", "same", lambda data: data["data"].update(median=4000), "different"),
    ("segments", "same", lambda data: [w.update(segments=[200, 300]) for w in data["work"]], "different"),
    ("gate", "different", lambda data: data["rows"].remove(find(data, "attention", "global", "bent")), "same"),
    ("cudnn-forward", "same", change("attention", "global", "cudnn", 4096, forward_ms=stat(9.0)), "different"),
    (
        "window-step",
        "same",
        change("attention", "window 512", "cudnn", 512, forward_backward_ms=stat(0.1)),
        "different",
    ),
    (
        "global-step",
        "same",
        change("attention", "global", "cudnn", 512, forward_backward_ms=stat(1.53, 0.1)),
        "different",
    ),
    ("flex-last", "same", change("attention", "global", "flex", 512, forward_backward_ms=stat(0.1)), "different"),
    ("flex-mask", "different", every_mask_dear, "same"),
    ("cudnn-graph", "same", change("attention", "global", "cudnn", 512, extra_ms={"graph": 0.1}), "different"),
    ("flash-ready", "same", change("attention", "global", "flash", 512, status="failed"), "different"),
    ("kda-flat", "same", slow_contexts, "different"),
    ("kda-window", "same", slow_fla, "different"),
    ("gdn-window", "same", gdn_dearest, "different"),
    ("heads", "same", wider_heads_free, "different"),
    ("arms", "same", gdn_dearest, "different"),
    ("fp8-bar", "same", change("mlp", "1024-4096-1024", "fp8_compiled", forward_backward_ms=stat(1.25)), "different"),
    ("fp8-bare", "same", lambda data: data["ceilings"].update(fp8_tflops=stat(700.0)), "different"),
    ("fp8-share", "same", change("mlp", "1024-4096-1024", "fp8_compiled", tflops=1099.0), "different"),
    ("head-time", "same", change("head", "softcap 20", "cce", forward_backward_ms=stat(1.0)), "different"),
    ("head-memory", "same", change("head", "softcap 20", "cce", peak_bytes=9e9), "different"),
    ("head-rate", "same", change("head", "softcap 20", "compiled", tflops=100.0), "different"),
    ("cudnn-records", "same", records_after_all, "different"),
    ("linear-split", "different", fla_fails_to_record, "same"),
    ("replay", "same", fla_fails_to_record, "different"),
    ("resets", "different", capped_and_whole, "not measured"),
    ("resets", "different", cut_off, "same"),
    ("cache", "different", found_empty_files, "same"),
]


@pytest.mark.parametrize(("name", "before", "apply", "after"), FLIPS)
def test_an_answer_follows_the_numbers(name, before, apply, after, tmp_path):
    data = report()
    assert told(tmp_path, data)[name].verdict == before, told(tmp_path, data)[name]
    apply(data)
    assert told(tmp_path, data)[name].verdict == after, told(tmp_path, data)[name]


def test_an_engine_that_is_not_there_is_answered_in_the_files_own_words(tmp_path):
    data = report()
    data["rows"] = [r for r in data["rows"] if (r["op"], r["case"], r["engine"]) != ("delta_rule", "gdn", "cudnn")]
    assert told(tmp_path, data)["gdn-flat"].why == "fla_gdn refused (wrong results under this Triton)"


def test_shares_of_a_step_are_computed_from_the_measured_rate(tmp_path):
    # 15 layers of 1.5 - 0.8 ms over 25e12 operations at 650 TFLOP/s, 38.5 ms.
    answer = told(tmp_path, report())["kda-share"]
    assert answer.ours.startswith("27 %")
    assert answer.verdict == "same"
