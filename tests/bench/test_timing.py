import time

import numpy as np
import pytest
import torch

from dwslm.bench.timing import Timer, measure_ceilings, stat

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "values", [[3.0], [1.0, 2.0], [5.0, 1.0, 4.0, 2.0, 9.0], list(np.random.default_rng(0).random(20))]
)
def test_median_and_interquartile_range_are_numpys(values):
    found = stat(values)
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    assert found.median == pytest.approx(middle) and found.spread == pytest.approx(high - low)
    assert found.n == len(values)


def test_a_sleep_is_timed_and_what_comes_before_it_is_not():
    timer = Timer(CPU, repeats=5, warm_up_s=0.0)
    found = timer.measure([lambda: time.sleep(0.005)], before=lambda: time.sleep(0.01))
    assert 5 <= found.median < 9
    assert found.n == 5


def test_calls_take_turns_and_are_warmed_up_first():
    made = []
    timer = Timer(CPU, repeats=6, warm_up_s=0.0)
    timer.measure([lambda i=i: made.append(i) for i in range(4)])
    assert made[-6:] == [0, 1, 2, 3, 0, 1]
    assert len(made) - 6 >= 4 and set(made[:-6]) == {0, 1, 2, 3}  # each was called before the clock ran


def test_a_cpus_ceilings_are_those_of_float32():
    found = measure_ceilings(Timer(CPU, repeats=3, warm_up_s=0.0), 1024)
    assert found["bf16_tflops"] is None and found["fp8_tflops"] is None
    assert found["float32_tflops"]["median"] > 0 and found["copy_gb_s"]["median"] > 0
