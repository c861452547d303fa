"""Products of edges' rows that do not depend on where a row stands."""

import pytest
import torch

from edgeless.programs.run import row_products

ROWS = 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 8, 19, 33, 64])
@pytest.mark.parametrize("out", [1, 3, 32, 65])
def test_rows_round_alike_wherever_they_stand(width, out, dtype):
    g = torch.Generator().manual_seed(width * out)
    x, matrix, row = (torch.randn(*shape, generator=g).to(dtype) for shape in ((ROWS, width), (out, width), (out,)))
    matrix = matrix.t()
    plain, added = row_products.mm(x, matrix), row_products.addmm(row, x, matrix)
    for count in (1, 2, 9, 30, 58, ROWS):
        some = torch.randint(ROWS, (count,), generator=g)
        assert torch.equal(row_products.mm(x[some], matrix), plain[some])
        assert torch.equal(row_products.addmm(row, x[some], matrix), added[some])
    exact = x.double() @ matrix.double()
    for found, expected in ((plain, exact), (added, exact + row.double())):
        assert found.dtype is dtype
        error = float((found.double() - expected).norm() / expected.norm())
        assert error <= (4 if dtype.itemsize > 2 else 1) * torch.finfo(dtype).eps


def test_a_matrix_too_wide_for_the_kernels():
    g = torch.Generator().manual_seed(0)
    x, matrix = torch.randn(40, 3, generator=g), torch.randn(3, (1 << 19) // 3 + 1, generator=g)
    found = row_products.mm(x, matrix)
    assert torch.equal(row_products.mm(x[5:7], matrix), found[5:7])


@pytest.mark.parametrize("rows", [0, 4])
def test_none_to_multiply(rows):
    assert row_products.addmm(torch.ones(2), torch.ones(rows, 0), torch.ones(0, 2)).tolist() == [[1.0, 1.0]] * rows
    assert row_products.mm(torch.ones(rows, 3), torch.ones(3, 0)).shape == (rows, 0)
