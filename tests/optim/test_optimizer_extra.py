"""State that the model changes besides its parameters: kept, loaded and cleared with the optimizer's own."""

from types import SimpleNamespace

import pytest
import torch

from tests.optim.small_model import optimizer, parameters, set_gradients, train


def test_extra_state_comes_back_in_place() -> None:
    mine, theirs = torch.tensor([1.0, 2.5]), torch.zeros(2)
    one = optimizer(parameters(), extra={"layer.peaks": mine})
    train(one, range(2))
    other = optimizer(parameters(seed=3), extra={"layer.peaks": theirs})
    saved = one.state()
    mine.fill_(9.0)  # what was saved is a copy
    other.load(one.weights(), saved)
    assert theirs.tolist() == [1.0, 2.5]
    targets = {name: torch.empty_like(tensor) for name, tensor in saved.items()}
    other.copy_to({name: torch.empty_like(w) for name, w in one.weights().items()}, targets)
    assert targets["layer.peaks"].tolist() == [1.0, 2.5]


def test_weights_alone_start_without_it() -> None:
    extra = torch.ones(3)
    opt = optimizer(parameters(), extra={"layer.peaks": extra})
    opt.load_weights(opt.weights())
    assert extra.tolist() == [0.0, 0.0, 0.0]


def test_a_state_without_it_is_refused() -> None:
    plain, with_extra = optimizer(parameters()), optimizer(parameters(), extra={"layer.peaks": torch.ones(3)})
    with pytest.raises(ValueError, match="optimizer state lack layer.peaks"):
        with_extra.load(plain.weights(), plain.state())
    with pytest.raises(ValueError, match="hold layer.peaks"):
        plain.load(with_extra.weights(), with_extra.state())


def test_ranks_go_on_from_the_mean() -> None:
    """Two ranks of which the other one's share is given: sums are what both together would have."""
    extra, other = torch.tensor([1.0, 4.0]), torch.tensor([3.0, 0.0])

    def add(tensor: torch.Tensor) -> None:
        if tensor.shape == other.shape and torch.equal(tensor, torch.tensor([1.0, 4.0])):
            tensor += other

    ranks = SimpleNamespace(rank=0, world=2, sum=add, scatter_sum=lambda flat: None, gather=lambda flat: None)
    opt = optimizer(parameters(), ranks=ranks, extra={"layer.peaks": extra})
    set_gradients(opt.params, 1)
    opt.accumulate()
    opt.step(0.01)
    assert extra.tolist() == [2.0, 2.0]
