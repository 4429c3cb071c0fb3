"""Sizes that a run would crash on, hang on or be killed for are refused when the configuration is composed."""

import pytest

from tests.config.test_check import composed, of_kind

# What no memory is asked for by: time, the text there is, or another setting is the limit.
ANY_AMOUNT = {
    "train.tokens", "train.batch_tokens", "train.seed", "train.log_every", "train.eval_every_tokens", "train.eval_documents",
    "checkpoint.every_tokens", "checkpoint.keep_last", "checkpoint.max_failures", "guard.off_for", "guard.max_skips",
    "guard.stretch", "guard.max_rollbacks", "evaluate.max_documents", "evaluate.seed", "spelling_tests.seed",
    "spelling_tests.shots", "model.window", "model.base_depth", "model.rope.yarn_context",
}  # fmt: skip
SIZES = [case for case in of_kind(int) if case[1] not in ANY_AMOUNT]


@pytest.mark.parametrize("value", [10**10, 2**63 - 1])
@pytest.mark.parametrize(("program", "name"), SIZES)
def test_a_size_that_no_machine_has_is_refused_by_name(program, name, value):
    with_it = {
        "model.kv_heads": f"model.heads={value}",  # which it must divide
        "train.micro_batch_tokens": f"train.batch_tokens={value}",
    }
    with pytest.raises(ValueError, match=str(value)) as told:
        composed(program, f"{name}={value}", *([with_it[name]] if name in with_it else []))
    part, _, leaf = name.removeprefix("model.kv_").rpartition(".")
    assert leaf in str(told.value) and part.rpartition(".")[2] in str(told.value)


@pytest.mark.parametrize(("program", "name"), [case for case in of_kind(int) if case[1] in ANY_AMOUNT])
def test_amounts_that_ask_for_no_memory_may_be_large(program, name):
    composed(program, f"{name}={2**40}", *(["spelling=true"] if name.startswith("spelling_tests.") else []))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("evaluate.bands=[256,1_000_000_000_000]", r"evaluate bands .*: the last must be at most 1048576"),
        (
            "data.packing.ladder=[{start: 0.5, segments_per_row: 1_000_000}]",
            "ladder segments_per_row 1000000: must be at most",
        ),
        (
            "data.packing.ladder=[{start: 0.5, context: 10_000_000_000}]",
            "window_tokens .* at least the context, 10000000000",
        ),
        ("train.micro_batch_tokens='1_000_000_000_000'", "train.micro_batch_tokens=1000000000000 must be at most"),
        ("train.threads=1025", "train.threads=1025 must be at most 1024"),
        ("train.prefetch=1_000_000", "train.prefetch=1000000 must be at most 1024"),
        ("guard.window=1_000_000", "guard.window=1000000: must be at most 100000"),
        ("model.layers=0", "model.layers=0 must be from 1 to 1024"),
        ("model.layers=-4", "model.layers=-4 must be from 1 to 1024"),
        ("ranks.silence_seconds=1e300", r"ranks.silence_seconds=1e\+300: must be from 5 to 1e\+09"),
        ("track.finish_seconds=1e300", r"track.finish_seconds=1e\+300 must be from 0 to 1e\+09"),
    ],
)
def test_the_limit_is_told(word, message):
    with pytest.raises(ValueError, match=message):
        composed("train.py", word)


def test_sizes_in_use_today_are_far_below_the_limits():
    composed("train.py", "model.layers=128", "model.width=16_384", "model.mlp_hidden=65_536", "evaluate.context=131_072",
             "evaluate.micro_batch_tokens=524_288", "evaluate.bootstrap_samples=100_000", "data.packing.context=1_048_576",
             "data.packing.window_tokens=134_217_728", "data.packing.segments_per_row=4096", "train.threads=512",
             "train.micro_batch_tokens=2_097_152", "train.batch_tokens=16_777_216", "guard.window=10_000")  # fmt: skip
