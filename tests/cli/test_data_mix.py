"""`dwslm data mix`: what a plan will serve, and what it is refused for, before it is paid for."""

import argparse
import json
import shutil

import numpy as np
import pytest

from dwslm.cli.data_mix import add_arguments_mix, run_mix
from dwslm.cli.demo import VOCAB_SIZE
from dwslm.data.prepare_settings import DEMO_DATA
from dwslm.data.shards import open_dataset

SMALL = ["experiment=demo", "train.tokens=204800", "train.batch_tokens=2048", "train.micro_batch_tokens=1024",
         "data.packing.window_tokens=4096"]  # fmt: skip


def mix(data, tmp_path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments_mix(parser)
    given = [*SMALL, f"data.path={data}", "data.mixture.phases=[]", f"--cache={tmp_path}", *arguments]
    return run_mix(parser.parse_intermixed_args(given))


def test_tokens_and_epochs_by_source_and_phase(tiny_data, tmp_path, capsys):
    sources = open_dataset(tiny_data / "train").sources
    arguments = [
        f"data.mixture.anneal.sources=[{sources[0]}]",
        f"+data.mixture.rephrased={{{sources[0]}: {sources[1]}}}",
    ]
    assert mix(tiny_data, tmp_path, *arguments, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [phase["start"] for phase in told["phases"]] == [0.0, 0.75]
    assert set(told["sources"]) == set(sources)
    first, last = (phase["sources"][sources[0]]["share"] for phase in told["phases"])
    assert last == pytest.approx(2 * first / (1 + first), rel=0.15)
    assert told["planned_tokens"] == 204_800 and told["rephrased"] == {sources[0]: sources[1]}
    assert told["stochastok"] == 0
    assert list(tmp_path.glob("rows-*.npz"))  # counted for the run that follows

    assert mix(tiny_data, tmp_path, *arguments) == 0
    said = capsys.readouterr().out
    assert (
        f"{sources[0]}, rephrased from {sources[1]}" in said and "from 75%" in said and "micro-batches of 1,024" in said
    )


def test_what_is_served_in_one_phase_is_told_once(tiny_data, tmp_path, capsys):
    assert mix(tiny_data, tmp_path) == 0
    said = capsys.readouterr().out
    rows = [line.split("│")[1:-1] for line in said.splitlines() if line.startswith("│")]
    told = [[cell.strip() for cell in row] for row in rows if len(row) == 6]
    sources = open_dataset(tiny_data / "train").sources
    assert sorted(row[2] for row in told) == sorted(sources) and told[0][:2] == ["all", "256"]
    assert mix(tiny_data, tmp_path, f"data.mixture.anneal.sources=[{sources[0]}]") == 0
    said = capsys.readouterr().out
    assert "│ from 0% " in said and "│ from 75% " in said and "│ all " in said


def test_the_way_out_of_a_name_in_the_experiment_is_one(tiny_data, tmp_path):
    own = tmp_path / "conf" / "experiment" / "mine.yaml"
    own.parent.mkdir(parents=True)
    source = open_dataset(tiny_data / "train").sources[0]
    mixture = f"{{weights: {{{source}: 1, bokos: 1}}, phases: [{{start: 0.5, scale: {{bokos: 2}}}}]}}"
    own.write_text(f"# @package _global_\ndefaults: [demo]\ndata:\n  mixture: {mixture}\n")
    given = [
        *SMALL[1:],
        "experiment=mine",
        f"data.path={tiny_data}",
        f"--cache={tmp_path}",
        f"--config-dir={own.parents[1]}",
    ]
    parser = argparse.ArgumentParser()
    add_arguments_mix(parser)
    for names in (
        ["data.mixture.weights", "~data.mixture.weights.bokos"],
        ["data.mixture.phases[0].scale", "data.mixture.phases=[]"],
    ):
        with pytest.raises(ValueError) as caught:
            run_mix(parser.parse_intermixed_args(given))
        assert str(caught.value).startswith(f"{names[0]} names source ") and names[1] in str(caught.value)
        given.append(names[1])
    assert run_mix(parser.parse_intermixed_args(given)) == 0


def test_the_way_out_where_the_demo_has_no_data_is_the_demo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments_mix(parser)
    with pytest.raises(
        ValueError, match=r"data/demo/train is not a prepared dataset .* make it with `dwslm demo`"
    ) as caught:
        run_mix(parser.parse_intermixed_args(["experiment=demo"]))
    assert f"`dwslm prepare --sample --out {DEMO_DATA} --vocab-size {VOCAB_SIZE}`" in str(caught.value)
    with pytest.raises(ValueError, match="make it with `dwslm prepare --out data/mine --train FILES"):
        run_mix(parser.parse_intermixed_args(["experiment=demo", "data.path=data/mine"]))


def test_split_tokens_are_told(tiny_data, tmp_path, capsys):
    assert mix(tiny_data, tmp_path, "data.stochastok.enabled=true") == 0
    assert "StochasTok: 0.1 splits a token" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"proportion=0\.1 has no effect without data\.stochastok\.enabled=true"):
        mix(tiny_data, tmp_path, "data.stochastok.proportion=0.1")


def test_every_rung_and_its_rate_is_told(tiny_data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dwslm.cli.data_mix.MEASURED_SECONDS", 0.05)
    ladder = "data.packing.ladder=[{start: 0.5, context: 512, segments_per_row: 8}]"
    assert mix(tiny_data, tmp_path, ladder, "--measure", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [(rung["context"], rung["start"]) for rung in told["rungs"]] == [(256, 0.0), (512, 0.5)]
    measured = told["measured"]
    assert measured["tokens_per_second_256"] > 0 and measured["tokens_per_second_512"] > 0
    assert measured["first_batch_seconds"] > 0 and measured["resident_mib"] > 10 and "loader_mib" in measured


@pytest.mark.parametrize("shares", ["-5", "0", "nan", "inf", "-inf"])
def test_shares_of_no_number_of_tokens_are_refused(tmp_path, shares):
    with pytest.raises(ValueError, match=f"^--shares {shares}: must be a number of tokens, 1 or more"):
        mix(tmp_path / "nowhere", tmp_path, f"--shares={shares}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["+data.mixture.max_epochs={every: 0.5}"], r"exceeds data\.mixture\.max_epochs: .* its cap is 0\.5"),
        (["data.mixture.anneal.sources=[bokos]"], "'bokos', the dataset has"),
        (["data.mixture.phases=[{start: 0.2, end: 0.6}, {start: 0.5}]"], r"overlap: the one from 0\.2 to 0\.6"),
        (["+data.mixture.rephrased={bokos: web}"], "'bokos', the dataset has"),
        (["data.packing.ladder=[{start: 0.5, context: 768}]"], "micro_batch_tokens=1024 is not a multiple of .* 768"),
    ],
)
def test_refused_before_training(tiny_data, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        mix(tiny_data, tmp_path, *arguments)


def test_a_held_out_document_in_training_is_refused(tiny_data, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    shutil.rmtree(data / "valid")
    shutil.copytree(data / "train", data / "valid")
    documents = len(open_dataset(data / "train"))
    with pytest.raises(ValueError, match=f"{documents} of the {documents} held-out documents"):
        mix(data, tmp_path)


def test_a_held_out_text_in_training_is_refused_unless_that_is_asked_for(tiny_data, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    shutil.rmtree(data / "valid")
    shutil.copytree(data / "train", data / "valid")
    documents = np.load(data / "valid" / "00000.docs.npy")
    documents["id_hash"] ^= np.uint64(1)
    np.save(data / "valid" / "00000.docs.npy", documents)
    with pytest.raises(ValueError, match=f"{len(documents)} of the {len(documents)} held-out.*byte for byte.*--dedup"):
        mix(data, tmp_path)
    assert mix(data, tmp_path, "data.allow_held_out_copies=true") == 0
    assert f"note: {len(documents)} of the {len(documents)} held-out documents" in capsys.readouterr().out
