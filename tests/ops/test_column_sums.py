import pytest
import torch

from tests.ops.helpers import relative_error


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "columns"), [((1, 1), (1, 1)), ((256, 1000), (1024, 128)), ((259, 3), (48, 5)), ((7, 600), (17, 33))]
)
def test_column_sums_of_two_matrices(rows, columns):
    from dwslm.ops.column_sums import column_sums

    a, b = (torch.randn(n, m, device="cuda") for n, m in zip(rows, columns, strict=True))
    got = column_sums(a, b)
    want = torch.cat([a.double().sum(0), b.double().sum(0)])
    assert got.dtype == torch.float32 and relative_error(got, want) < 1e-6
    assert torch.equal(got, column_sums(a, b))
    assert torch.equal(got[: columns[0]], column_sums(a))
