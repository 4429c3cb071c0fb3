"""Growth and what the parts add, from JSON made by hand."""

import pytest

from dwslm.page import bench_step, bench_step_growth, bench_step_page
from tests.page.test_bench_step import piece, row


def build(
    name,
    ms,
    speed,
    *,
    layers=20,
    context=4096,
    micro=65_536,
    segments=None,
    values="global",
    depth=8,
    spread=2.0,
    **more,
):
    """A row with its configuration. `ms` is of its own micro-batch."""
    model = {"layers": layers, "value_embeddings": values, "depth_block": depth, "rope": {"theta": 1e4}}
    packing = {"context": context, "segments_per_row": segments or context // 128}
    config = {"model": model, "train": {"micro_batch_tokens": micro, "record": None}, "evaluate": {"seed": len(name)},
              "data": {"path": f"/somewhere/{name}", "packing": packing}}  # fmt: skip
    work = {"micro_batch_tokens": micro, "context": context, "layers": layers}
    given = {
        "config": config, "work": work, "matrix_parameters": 10_000_000 * layers + 30_000_000, "mfu": 0.3, "recorded": True,
        "micro_batch_ms": {"median": ms, "spread": spread, "n": 12}, "data": {"path": "x", "fingerprint": "f" * 64},
    }  # fmt: skip
    return row(name, speed, **given | more)


LAYERS = [
    build("main", 300.0, 210_000.0),
    build("layers_8", 132.0, 480_000.0, layers=8),
    build("layers_40", 290.0, 108_000.0, layers=40, micro=32_768),  # 580 ms for 65,536 tokens
]
CONTEXT = [
    build("context_1k", 290.0, 215_000.0, context=1_024),
    build("context_32k", 348.0, 180_000.0, context=32_768),
]
PLAIN = build("plain", 260.0, 240_000.0, values="none", depth=0, spread=1.5)


def markdown_of(tmp_path, builds):
    return bench_step_page.write([piece(tmp_path, "one", builds)], tmp_path / "out")[0].read_text()


def line_of(text, start):
    (line,) = [line for line in text.splitlines() if line.lstrip("→ ").startswith(start)]
    return line


def cells(text, name, after):
    """Of the first row of that name behind a heading."""
    line = next(line for line in text[text.index(after) :].splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_layers_grow_by_figures_of_the_file(tmp_path):
    text = markdown_of(tmp_path, [*LAYERS, PLAIN])
    title = "Layers, at context 4,096, recorded"
    assert cells(text, "layers_8", title) == [
        "layers_8", "8", "110,000,000", "65,536", "16 x 32", "480,000 (1,500)", "30 %", "317", "132 (2.0)",
        "16.5 (0.25)", "68.4",
    ]  # fmt: skip
    # 6 x 430M x 108,000 = 278.6 TFLOP/s; 290 ms of half as many tokens are 580, 14.5 a layer.
    assert cells(text, "layers_40", title) == [
        "layers_40", "40", "430,000,000", "32,768", "8 x 32", "108,000 (1,500)", "30 %", "279", "580 (4.0)",
        "14.5 (0.10)", "68.4",
    ]  # fmt: skip
    names = [name for name in ("layers_8", "main", "layers_40") if cells(text, name, title)]
    places = [text.index(f"| {name} |", text.index(title)) for name in names]
    assert places == sorted(places)
    # (300 - 132) / 12 and (2 + 2) / 12; (580 - 300) / 20 and (4 + 2) / 20.
    assert (
        "8 to 20 layers (layers_8 to main): each adds 14.0 ms to 65,536 tokens (spread of both together: 0.33)." in text
    )
    assert (
        "20 to 40 layers (main to layers_40): each adds 14.0 ms to 65,536 tokens (spread of both together: 0.30), of "
        "micro-batches of 65,536 and 32,768." in text
    )
    assert "Context, at" not in text
    assert "Layers, at context 4,096, recorded" in (tmp_path / "out" / "step.html").read_text()


def test_context_grows_beside_it_with_main_in_both(tmp_path):
    text = markdown_of(tmp_path, [*LAYERS, *CONTEXT])
    title = "Context, at 20 layers, recorded"
    assert cells(text, "context_1k", title)[1:5] == ["1,024", "230,000,000", "65,536", "64 x 8"]
    assert cells(text, "main", title)[1] == "4,096" and cells(text, "main", "Layers, at context")[1] == "20"
    assert cells(text, "context_32k", title)[4] == "2 x 256"
    # 300 / 290 and 348 / 290.
    assert "1,024 to 4,096 (context_1k to main): context times 4.00, time of 65,536 tokens times 1.03." in text
    assert "1,024 to 32,768 (context_1k to context_32k): context times 32.0, time of 65,536 tokens times 1.20." in text


def test_what_lies_within_the_spread_is_said_to(tmp_path):
    text = markdown_of(
        tmp_path, [build("main", 300.0, 210_000.0), build("context_1k", 299.0, 211_000.0, context=1_024)]
    )
    assert "time of 65,536 tokens times 1.00, within the larger spread." in text


def other(**change):
    """Main at 8 layers, and something else changed too."""
    made = build("layers_8", 132.0, 480_000.0, layers=8)
    for name, value in change.items():
        part, _, setting = name.partition("__")
        made[part] = (
            made[part] | {setting: value}
            if part != "config"
            else made[part] | {"model": made[part]["model"] | {setting: value}}
        )
    return made


@pytest.mark.parametrize(
    "change", [{"config__depth_block": 0}, {"config__mlp_precision": "fp8"}, {"data__fingerprint": "0" * 64}]
)
def test_a_build_that_differs_in_more_is_no_point_of_the_growth(change, tmp_path):
    main = build("main", 300.0, 210_000.0)
    main["config"]["model"]["mlp_precision"] = "model"
    text = markdown_of(tmp_path, [main, other(**{"config__mlp_precision": "model"} | change)])
    assert "## Growth" not in text
    assert "## Growth" in markdown_of(tmp_path, [main, other(config__mlp_precision="model")])


def test_a_peer_and_rows_without_a_configuration_take_no_part(tmp_path):
    peer = build("peer", 500.0, 100_000.0, layers=8)
    peer["peer"] = {"parameters": 1, "attention": "FlashAttention-2", "compiled": True, "not_compiled_because": None}
    text = markdown_of(tmp_path, [build("main", 300.0, 210_000.0), peer, row("bare")])
    assert "## Growth" not in text and "adds" not in text


def test_recorded_and_launched_grow_apart(tmp_path):
    def both(name, ms, layers):
        made = []
        for way in (True, False):
            one = build(f"{name} {'recorded' if way else 'launched'}", ms, 200_000.0, layers=layers, recorded=way)
            one["config"]["train"]["record"] = way
            made.append(one)
        return made

    text = markdown_of(tmp_path, [*both("main", 300.0, 20), *both("layers_8", 132.0, 8)])
    assert "8 to 20 layers (layers_8 recorded to main recorded)" in text
    assert (
        "8 to 20 layers (layers_8 launched to main launched)" in text
        and "layers_8 recorded to main launched" not in text
    )
    assert "Layers, at context 4,096, launched" in text


# ---- what the parts add ------------------------------------------------------------------------------------


def test_main_less_plain_is_what_its_parts_add(tmp_path):
    line = line_of(markdown_of(tmp_path, [*LAYERS, PLAIN]), "main less plain")
    assert line.lstrip("→ ") == (
        "main less plain: value embeddings + attention residuals add 40.0 ms to a micro-batch of 65,536 tokens, forward and "
        "backward (300 (2.0) less 260 (1.5), the spread of each in brackets). Net of the residual additions and norms of plain, "
        "which attention residuals replace; the update is not in it."
    )


def test_each_part_alone_and_a_difference_within_the_spread(tmp_path):
    builds = [PLAIN, build("no_depth", 261.0, 238_000.0, depth=0), build("no_values", 290.0, 215_000.0, values="none")]
    text = markdown_of(tmp_path, builds)
    values, depth = line_of(text, "no_depth less plain"), line_of(text, "no_values less plain")
    assert (
        "value embeddings add 1.00 ms" in values
        and "no more than the larger spread. All else of the two is alike" in values
    )
    assert "attention residuals add 30.0 ms" in depth and "Net of the residual additions" in depth


def test_other_micro_batches_are_scaled_and_the_nearest_is_taken(tmp_path):
    large = build(
        "plain", 510.0, 245_000.0, micro=131_072, values="none", depth=0, overrides=["train.micro_batch_tokens=131072"]
    )
    main = build("main", 300.0, 210_000.0)
    line = line_of(markdown_of(tmp_path, [main, large]), "main less plain")
    assert "add 45.0 ms" in line and line.endswith("Scaled from micro-batches of 65,536 and 131,072 tokens.")
    both = markdown_of(tmp_path, [main, large, PLAIN])
    assert "add 40.0 ms" in both and "add 45.0 ms" not in both and "Scaled from" not in both


def test_builds_of_other_text_or_settings_are_not_compared():
    def sentences(*rows):
        return bench_step_growth.added([bench_step.Build(one["name"], "ok", one, "a") for one in rows])

    main = build("main", 300.0, 210_000.0)
    assert len(sentences(main, PLAIN)) == 1
    assert sentences(main, build("plain", 260.0, 1.0, values="none", depth=0, data={"fingerprint": "0" * 64})) == []
    assert sentences(main, build("plain", 260.0, 1.0, values="none", depth=0, layers=8)) == []
    assert sentences(main, PLAIN | {"micro_batch_ms": None}) == []


# ---- settings that not every build has ----------------------------------------------------------------------


def fp8(made):
    """The build, with a precision that it names."""
    made["config"]["model"]["mlp_precision"] = "fp8"
    return made


def model_precision(made):
    made["config"]["model"]["mlp_precision"] = "model"
    return made


def old(**changes):
    """A build of a version without the setting."""
    return build("old", 310.0, 205_000.0, **changes)


def test_one_old_build_does_not_make_others_alike(tmp_path):
    """FP8 without the parts is no bare build for main in bfloat16, whoever else is on the page."""
    main, bare = model_precision(build("main", 300.0, 210_000.0)), model_precision(dict(PLAIN, config=config_of(PLAIN)))
    fast = fp8(build("fast", 200.0, 300_000.0, values="none", depth=0))
    for more in ([], [old(layers=12)], [old(values="none", depth=0, context=8_192)]):
        text = markdown_of(tmp_path, [main, bare, fast, *more])
        assert "main less plain: value embeddings + attention residuals add 40.0 ms" in text
        assert "less fast" not in text
    without = markdown_of(tmp_path, [main, fast, old(layers=12)])
    assert "main less" not in without


def config_of(made):
    return {name: dict(part) for name, part in made["config"].items()}


def test_an_old_build_is_no_point_of_builds_that_differ_in_what_it_lacks(tmp_path):
    main, small = model_precision(build("main", 300.0, 210_000.0)), fp8(build("small", 100.0, 600_000.0, layers=8))
    assert "## Growth" not in markdown_of(tmp_path, [main, small, old(layers=40)])


def test_a_setting_that_all_agree_on_who_have_it_parts_nobody(tmp_path):
    main = model_precision(build("main", 300.0, 210_000.0))
    assert "8 to 20 layers (old to main)" in markdown_of(tmp_path, [main, old(layers=8)])


@pytest.mark.parametrize("layers", [0, -8, "8", 8.0, True, None])
def test_layers_that_are_no_number_of_layers_take_no_part(layers, tmp_path):
    made = build("odd", 132.0, 480_000.0)
    made["config"]["model"]["layers"] = layers
    text = markdown_of(tmp_path, [*LAYERS, made])
    assert "| odd (a build) |" in text and "| odd |" not in text[text.index("## Growth") : text.index("## Power")]
