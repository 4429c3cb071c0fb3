"""The measuring process: asked, ended when it takes too long, started again when it is gone."""

import pytest

from dwslm.bench.process import Ended, Process
from dwslm.bench.request import Request


def test_it_answers_is_ended_and_starts_again(tiny_data, tmp_path):
    process = Process(tmp_path / "worker.log")
    request = Request(data=str(tiny_data / "train"), seed=1, ops=["norm"], tokens=[128], contexts=[128], heads=[1],
                      small=True, device="cpu", repeats=1, warm_up_s=0.0).as_json()  # fmt: skip
    try:
        (opened,) = process.ask({"do": "open", "request": request}, 120)
        assert [case["op"] for case in opened["catalogue"]] == ["norm"] and opened["machine"]["device"] == "CPU"
        job = {"op": "norm", "case": opened["catalogue"][0]["case"], "heads": None, "engine": "eager", "tokens": 128,
               "context": None, "record": True, "at_size": True,
               "ceilings": {"copy_gb_s": {"median": 1.0}, "float32_tflops": {"median": 1.0}}}  # fmt: skip
        *rows, last = process.ask({"do": "row", "job": job}, 120)
        assert rows[-1]["row"]["status"] == "ok" and last == {"done": True, "broken": None}
        with pytest.raises(ValueError, match="nowhere"):
            list(process.ask({"do": "open", "request": request | {"data": "/nowhere"}}, 120))
        assert process.running
        with pytest.raises(Ended, match="not finished after 0 s"):
            list(process.ask({"do": "row", "job": job}, 0.0))
        assert not process.running
        with pytest.raises(Ended, match="ended with code 1: .*AssertionError"):  # asked for a row before it was opened
            list(process.ask({"do": "row", "job": job}, 120))
        assert not process.running
    finally:
        process.close()
