"""The loss head in float8 against float32, and its kernels against its formulas."""

import pytest
import torch
from torch import Tensor

from dwslm.ops.fp8 import new_peaks, remember
from dwslm.ops.fp8.formats import BOUNDED, FP8_MAX, MARGIN
from dwslm.ops.loss_head import IGNORE, fp8, misfit, total_nats_delayed
from dwslm.ops.loss_head.reference import token_nats_reference
from tests.ops.helpers import relative_error

CPU = torch.device("cpu")


def draw(tokens: int = 96, vocab: int = 512, width: int = 64, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """Hidden states that point to their target's row by some share, as a trained model's do."""
    torch.manual_seed(0)
    weight = torch.randn(vocab, width) * width**-0.5
    targets = torch.randint(0, vocab, (tokens,))
    share = torch.rand(tokens, 1)
    towards = 3 * torch.nn.functional.normalize(weight[targets], dim=-1)
    hidden = share * towards * width**0.5 + torch.randn(tokens, width)
    targets[::7] = IGNORE
    made = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
    return *made, targets.to(device)


def errors(hidden: Tensor, weight: Tensor, targets: Tensor, peaks: Tensor) -> list[float]:
    """Of the loss, in nats a scored token; of both gradients, relative."""
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    want = token_nats_reference(*wide, targets, 20.0, IGNORE).sum()
    want_grads = torch.autograd.grad(want / 80, wide)
    total = total_nats_delayed(hidden, weight, targets, 20.0, peaks)
    grads = torch.autograd.grad(total / 80, (hidden, weight))
    return [
        abs(total.item() - want.item()) / int((targets != IGNORE).sum()),
        *(relative_error(g, w) for g, w in zip(grads, want_grads, strict=True)),
    ]


@pytest.mark.parametrize("known", [False, True], ids=["first", "delayed"])
@pytest.mark.parametrize(("tokens", "vocab"), [(96, 512), (90, 500), (5, 16)])
def test_value_and_gradients_are_near_the_reference(tokens: int, vocab: int, known: bool) -> None:
    hidden, weight, targets = draw(tokens, vocab)
    peaks = new_peaks(2)
    if known:  # twice as large as they are: one bit less
        peaks.data.copy_(torch.stack([2 * hidden.abs().amax(), 2 * weight.abs().amax()]))
    loss, *grads = errors(hidden, weight, targets, peaks)
    assert loss < 0.03 and max(grads) < 0.10


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = draw(tokens=300)
    told = []
    for size in (2**30, 1):  # one chunk, and three of the least size
        monkeypatch.setattr(fp8, "CHUNK_BYTES", size)
        total = total_nats_delayed(hidden, weight, targets, 20.0, new_peaks(2))
        told.append((total.detach(), *torch.autograd.grad(total, (hidden, weight))))
    assert relative_error(told[1][0], told[0][0]) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(told[0][1:], told[1][1:], strict=True))


def test_the_peaks_are_those_of_hidden_states_and_weight_and_are_taken_over() -> None:
    hidden, weight, targets = draw()
    peaks = new_peaks(2)
    total_nats_delayed(hidden, weight, targets, 20.0, peaks).backward()
    assert peaks.grad is not None and peaks.grad.tolist() == [hidden.abs().max().item(), weight.abs().max().item()]
    remember([peaks])
    assert peaks.grad is None and (peaks > 0).all()
    peaks.data.mul_(1e-3)  # far too small: what is beyond 1.5 times the peak saturates, and the loss shows it
    assert errors(hidden, weight, targets, peaks)[0] > 0.05 and MARGIN == 1.5


def test_small_probabilities_are_kept() -> None:
    """Logits (9, -9, ..., -9): each wrong entry has e^-18 = 1.5e-8, and its row's gradient is that times the hidden state."""
    hidden = torch.zeros(16, 16)
    hidden[:, 0] = 1.0
    weight = torch.zeros(32, 16)
    before = 20 * torch.atanh(torch.tensor(9 / 20.0))
    weight[:, 0] = -before
    weight[0, 0] = before
    weight.requires_grad_()
    exact = torch.tensor([1.0, before]) * FP8_MAX / MARGIN / 256  # a peak with which both are 256 steps
    total = total_nats_delayed(hidden, weight, torch.zeros(16, dtype=torch.long), 20.0, exact.requires_grad_())
    (gradient,) = torch.autograd.grad(total, weight)
    slope = 1 - (9 / 20.0) ** 2
    want = 16 * slope * torch.exp(torch.tensor(-18.0))
    assert torch.allclose(gradient[1:, 0], want.expand(31), rtol=0.15)
    assert not gradient[:, 1:].any()


def test_what_is_not_scored_leaves_no_gradient() -> None:
    hidden, weight, targets = draw()
    total = total_nats_delayed(hidden, weight, torch.full_like(targets, IGNORE), 20.0, new_peaks(2))
    assert total.item() == 0 and not any(g.any() for g in torch.autograd.grad(total, (hidden, weight)))
    total = total_nats_delayed(hidden, weight, targets, 20.0, new_peaks(2))
    assert not torch.autograd.grad(total, hidden)[0][::7].any()


@pytest.mark.parametrize("factor", [1.0, -0.25])
def test_any_upstream_gradient_and_only_once(factor: float) -> None:
    hidden, weight, targets = draw()
    once = torch.autograd.grad(total_nats_delayed(hidden, weight, targets, 20.0, new_peaks(2)), (hidden, weight))
    total = total_nats_delayed(hidden, weight, targets, 20.0, new_peaks(2))
    scaled = torch.autograd.grad(factor * total, (hidden, weight), retain_graph=True)
    assert all(torch.equal(factor * a, b) for a, b in zip(once, scaled, strict=True))
    with pytest.raises(RuntimeError, match="handed out already"):
        total.backward()


def test_what_is_not_finite_reaches_the_loss() -> None:
    for bad in (float("inf"), float("nan")):
        hidden, weight, targets = draw()
        hidden.data[3, 5] = bad
        assert total_nats_delayed(hidden, weight, targets, 20.0, torch.ones(2, requires_grad=True)).isnan()


def test_widths_that_do_not_fit_are_refused() -> None:
    reason = misfit("fp8_delayed", CPU, torch.float32, 60)
    assert reason == "FP8 products need widths that are multiples of 16, not (60,): set model.head_precision=model"
    assert misfit("model", CPU, torch.float32, 60) is None
    with pytest.raises(ValueError, match=r"set model\.head_precision=model"):
        total_nats_delayed(torch.zeros(4, 60), torch.zeros(8, 60), torch.zeros(4, dtype=torch.long), 20.0, new_peaks(2))


GPU_CASES = [(1000, 32768, 256), (90, 500, 64), (256, 4096, 64), (16, 5003, 64), (4096, 1024, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [1, 2**30])
@pytest.mark.parametrize(("tokens", "vocab", "width"), GPU_CASES)
def test_kernels_are_near_the_reference_with_the_same_bits_each_time(
    tokens: int, vocab: int, width: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "CHUNK_BYTES", chunk)
    hidden, weight, targets = draw(tokens, vocab, width, torch.bfloat16, "cuda")
    loss, *grads = errors(hidden, weight, targets, new_peaks(2, hidden.device))
    assert loss < 0.03 and max(grads) < 0.10
    told = []
    for _ in range(2):
        peaks = new_peaks(2, hidden.device)
        total = total_nats_delayed(hidden, weight, targets, 20.0, peaks)
        told.append((total.detach(), *torch.autograd.grad(total, (hidden, weight, peaks))))
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "vocab"), [(256, 2048), (48, 5008), (640, 32768)])
def test_kernels_give_what_the_formulas_give(tokens: int, vocab: int) -> None:
    """The same logits to both. Exponentials are rounded apart there, so a value may be a step of e5m2 off."""
    from dwslm.ops.loss_head.fp8_kernels import gradient

    torch.manual_seed(0)
    logits = (6 * torch.randn(tokens, vocab)).bfloat16()
    real = vocab - 5
    targets = torch.randint(0, real, (tokens,))
    targets[::7] = IGNORE
    told = []
    for function, device in ((fp8._formulas, "cpu"), (gradient, "cuda")):
        nats = torch.zeros(tokens, device=device)
        whole = torch.empty(vocab, 2 * tokens, dtype=BOUNDED, device=device)
        d8 = function(logits.to(device), targets.to(device), nats, whole[:, tokens:], real, 20.0, IGNORE)
        assert torch.equal(whole[:, tokens:].float(), d8.float().t())
        told.append((nats.sum().cpu(), d8.float().cpu()))
    assert relative_error(told[1][0], told[0][0]) < 1e-5
    want, got = told[0][1], told[1][1]
    assert not got[::7].any() and not got[:, real:].any()
    assert ((got - want).abs() <= 0.25 * want.abs() + 2**-16).all()
    assert (got != want).float().mean() < 0.01


@pytest.mark.gpu
def test_kernels_hand_on_what_is_not_finite() -> None:
    for bad in (float("inf"), float("nan")):
        hidden, weight, targets = draw(256, 4096, 64, torch.bfloat16, "cuda")
        hidden.data[3, 5] = bad
        assert total_nats_delayed(
            hidden, weight, targets, 20.0, torch.ones(2, device="cuda", requires_grad=True)
        ).isnan()
