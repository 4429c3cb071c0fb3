import pytest

from dwslm.bench.plan import alone, make_plan, needed
from dwslm.bench.request import Request


def engine(name, patience=40.0, missing=None):
    return {"engine": name, "patience": patience, "missing": missing}


def case(op, name, heads, engines, by_context=False, sized=True):
    return {"op": op, "case": name, "heads": heads, "sized": sized, "by_context": by_context, "engines": engines}


DELTA = [engine("cudnn", 90), engine("fla", 240), engine("torch")]
CATALOGUE = [
    case(
        "attention",
        "global",
        8,
        [engine("flash"), engine("fa3", missing="not installed: x"), engine("flex", 90), engine("torch")],
        True,
    ),
    case("delta_rule", "kda", 8, DELTA, True),
    case("delta_rule", "kda", 16, DELTA, True),
    case("mlp", "a", None, [engine("compiled")]),
    case("newton_schulz", "n", None, [engine("compiled")], sized=False),
]
REQUEST = Request(data="x", seed=0)


def test_the_most_important_comes_first():
    jobs = make_plan(REQUEST, CATALOGUE)
    sizes = [(job.op, job.engine, job.tokens, job.context, job.heads) for job in jobs]
    assert sizes[:2] == [("attention", "flash", 16_384, 4096, 8), ("attention", "fa3", 16_384, 4096, 8)]
    assert len(set(sizes)) == len(sizes)

    def at(*key):
        return sizes.index(key)

    tuned = at("delta_rule", "fla", 16_384, 4096, 8)
    assert at("delta_rule", "cudnn", 16_384, 4096, 8) < at("delta_rule", "cudnn", 65_536, 4096, 8) < tuned
    # What compiles for minutes waits for what is certain at the first size; its other sizes wait for everything else.
    assert at("attention", "flash", 16_384, 512, 8) < tuned < at("delta_rule", "cudnn", 16_384, 4096, 16)
    assert tuned < at("attention", "flash", 65_536, 512, 8) < at("attention", "flex", 16_384, 512, 8)
    assert at("attention", "flex", 16_384, 4096, 8) < at("attention", "flash", 65_536, 4096, 8) < tuned
    assert tuned < at("delta_rule", "fla", 65_536, 4096, 8) < at("delta_rule", "fla", 16_384, 4096, 16)
    assert at("mlp", "compiled", 16_384, None, None) < at("mlp", "compiled", 65_536, None, None)
    assert sizes.count(("newton_schulz", "compiled", None, None, None)) == 1  # it has nothing to do with a batch


def test_every_size_that_was_asked_for_is_there():
    jobs = make_plan(REQUEST, CATALOGUE)
    flash = {(job.tokens, job.context) for job in jobs if job.engine == "flash"}
    assert flash == {(t, c) for t in (16_384, 65_536) for c in (512, 1024, 2048, 4096)}
    heads = {(job.heads, job.tokens) for job in jobs if job.engine == "cudnn"}
    assert heads == {(8, 16_384), (8, 65_536), (16, 16_384), (16, 65_536)}
    # What is not installed is said once; plain PyTorch is measured once a number of heads.
    assert sum(job.engine == "fa3" for job in jobs) == 1
    assert sum(job.engine == "torch" and job.op == "attention" for job in jobs) == 1


def test_only_the_first_size_is_recorded():
    assert {(job.tokens, job.context) for job in make_plan(REQUEST, CATALOGUE) if job.record} <= {
        (16_384, 4096),
        (16_384, None),
        (None, None),
    }


def test_quick_and_named_engines():
    quick = make_plan(Request(data="x", seed=0, quick=True), CATALOGUE)
    assert {job.tokens for job in quick} <= {16_384, None} and {job.context for job in quick} <= {4096, None}
    named = make_plan(Request(data="x", seed=0, engines=["flash"]), CATALOGUE)
    assert {job.engine for job in named} == {"flash"}


def test_a_row_is_begun_only_with_time_left_and_a_known_engine_needs_less():
    jobs = {job.engine: job for job in make_plan(REQUEST, CATALOGUE) if job.heads == 8 and job.tokens == 16_384}
    assert needed(jobs["fla"], set()) == 60
    assert needed(jobs["fla"], {jobs["fla"].key}) < 10
    assert needed(jobs["flash"], set()) == 10


def test_the_command_that_measures_a_skipped_row_alone():
    job = next(job for job in make_plan(REQUEST, CATALOGUE) if job.heads == 16 and job.engine == "fla")
    command = "dwslm bench delta_rule --engines fla --tokens 16384 --contexts 4096 --heads 16"
    assert alone(job, REQUEST) == command


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ops": ["attention", "softmax"]}, "unknown operation 'softmax'"),
        ({"tokens": [1000], "contexts": [512]}, "1,000 tokens are not a whole number of rows of 512"),
        ({"tokens": []}, "at least one"),
        ({"heads": [0]}, "heads must be 1 or more"),
        ({"budget_s": 0.0}, "above 0"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Request(**({"data": "x", "seed": 0} | wrong))


def test_a_request_crosses_to_the_other_process():
    request = Request(data="x", seed=3, engines=["flash"], tokens=[512], contexts=[512])
    assert Request.from_json(request.as_json()) == request
