"""Every branch of the CPU products of gated_mlp: rows, columns and depths around its tiles, and layouts."""

import itertools
import math

import pytest
import torch

from htree_ops.reference import gated_mlp as reference
from tests.support.cases import normal
from tests.support.compare import assert_close_spec
from tests.support.devices import poisoned_memory
from tests.support.gated_mlp_cases import RTOL, GatedMLPCase, assert_forward
from tests.support.instruction_sets import ISAS, run_with
from tests.support.layouts import with_strides

op = torch.ops.htree.gated_mlp
op_forward = torch.ops.htree._gated_mlp_forward
op_saved_backward = torch.ops.htree._gated_mlp_saved_backward

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Tiles of 1 to 4 rows, 64 rows at a time; above 128 rows fp32 uses the BLAS library.
ROWS = (1, 2, 3, 4, 5, 6, 63, 65, 128, 129)
#: Groups of 4 or 6 columns, 48 at a time.
COLUMNS = (1, 3, 5, 6, 7, 49)
#: Vectors of 4 to 32 elements, chains of 32 vectors.
DEPTHS = (1, 15, 17, 32, 513, 1059)


def check(rows: int, inner: int, hidden: int, dtype: torch.dtype, activation: str = "silu") -> None:
    inputs = GatedMLPCase(
        name="cpu", dtype=dtype, rows=(rows,), inner=inner, hidden=hidden, activation=activation
    ).make_inputs("cpu", seed=rows + inner + hidden)
    with poisoned_memory():
        out = op(*inputs)
        kept = op_forward(*inputs)
    assert_forward(out, inputs)
    assert torch.equal(kept[0], out)
    unit = torch.finfo(dtype).eps / 2
    for product, weight in zip(kept[1:], inputs[1:3], strict=True):
        expected = inputs[0].double() @ weight.double().mT
        magnitudes = inputs[0].double().abs() @ weight.double().abs().mT
        assert_close_spec(product, expected, 1.01 * unit, 2.0**-20 * magnitudes + 1e-7, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_sizes_around_the_tiles(rows, dtype):
    for i, (inner, hidden) in enumerate(itertools.product(COLUMNS, DEPTHS)):
        check(rows, inner, hidden, dtype, "silu" if i % 2 else "gelu")


@pytest.mark.parametrize("isa", [*ISAS[1:], "avx512_bf16"])  # the baseline leaves 5 rows and more to BLAS
def test_a_row_has_the_same_bits_among_few_and_many(isa):
    """Weights of half types are widened for many rows at once, which changes no sum."""
    script = (
        "import torch\n"
        "from test_gated_mlp_cpu import op\n"
        "from tests.support.gated_mlp_cases import GatedMLPCase\n"
        "for dtype in (torch.float16, torch.bfloat16):\n"
        "    for inner, hidden in ((5, 40), (50, 33), (61, 1059)):\n"
        "        case = GatedMLPCase(name='cpu', dtype=dtype, rows=(130,), inner=inner, hidden=hidden)\n"
        "        x, *weights = case.make_inputs('cpu')\n"
        "        full = op(x, *weights)\n"
        "        for rows in (5, 15, 16, 64, 79, 80):\n"
        "            assert torch.equal(op(x[:rows], *weights), full[:rows]), (dtype, inner, hidden, rows)\n"
    )
    ran = run_with(isa, script)
    assert ran.returncode == 0, ran.stderr


def test_an_empty_instruction_set_is_the_default():
    script = "import torch, htree_ops; x = torch.ones(1, 3); print(torch.ops.htree.gated_mlp(x, x, x).isfinite().all())"
    shown = run_with("", script)
    assert (shown.returncode, shown.stdout.strip()) == (0, "tensor(True)"), shown.stderr
    assert "HTREE_CPU_ISA must be baseline" in run_with("sse", script).stderr


@pytest.mark.parametrize("isa", [*ISAS, "avx512_bf16"])
def test_every_instruction_set(isa):
    script = (
        "import torch\n"
        "from test_gated_mlp_cpu import DTYPES, check\n"
        "for dtype in DTYPES:\n"
        "    for rows in (1, 2, 3, 4, 5, 7, 66):\n"
        "        for inner, hidden in ((1, 1), (5, 40), (7, 1059), (50, 33)):\n"
        "            check(rows, inner, hidden, dtype)\n"
    )
    ran = run_with(isa, script)
    assert ran.returncode == 0, ran.stderr


def test_unknown_instruction_set():
    script = "import torch, htree_ops; x = torch.ones(1, 1); torch.ops.htree.gated_mlp(x, x, x)"
    ran = run_with("sse9", script)
    assert "must be baseline, avx2, avx512 or avx512_bf16, got sse9" in ran.stderr


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 7, 70])
def test_layouts_give_the_same(rows, dtype):
    inner, hidden = 53, 70
    x, gate, up, *options = GatedMLPCase(
        name="layouts", dtype=dtype, rows=(rows,), inner=inner, hidden=hidden
    ).make_inputs("cpu")
    expected = op(x, gate, up, *options)
    pitched = [with_strides(w, (hidden + 3, 1), offset=1) for w in (gate, up)]
    assert torch.equal(op(with_strides(x, (hidden + 1, 1), offset=3), *pitched, *options), expected)
    columns = x.t().contiguous().t()
    assert torch.equal(op(columns, gate, up, *options), expected)
    # weights stored by columns use the BLAS library, which adds in another order
    in_columns = [w.t().contiguous().t() for w in (gate, up)]
    for weights in (in_columns, (gate, in_columns[1]), (in_columns[0], up)):
        assert_forward(op(x, *weights, *options), (x, gate, up, *options))
    one = gate[:1].expand(inner, hidden)
    assert torch.equal(op(x, one, one, *options), op(x, one.contiguous(), one.contiguous(), *options))
    assert torch.equal(op(-x, gate, up, *options), op(torch._neg_view(x), gate, up, *options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 70])
def test_the_bits_of_a_row_and_a_column_are_their_own(rows, dtype):
    x, gate, up, *options = GatedMLPCase(
        name="own", dtype=dtype, rows=(rows,), inner=100, hidden=200
    ).make_inputs("cpu")
    whole = op(x, gate, up, *options)
    row, column = rows - 1, 51
    gate[:column], up[column + 1 :], x[:row] = math.nan, math.inf, math.nan
    assert torch.equal(op(x, gate, up, *options)[row, column], whole[row, column])


@pytest.mark.parametrize("rows", [1, 6])
def test_long_sums_of_one_sign(rows):
    """At any depth a sum has 33 roundings to fp32, where a chain of 2^17 additions has 2^17."""
    hidden = 131072 + 5
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(rows, hidden, generator=generator)
    gate, up = (torch.rand(7, hidden, generator=generator) for _ in range(2))
    _, products, _ = op_forward(x, gate, up)
    expected = x.double() @ gate.double().mT
    assert ((products - expected).abs() <= 33 * 2.0**-24 * expected).all()


def test_more_rows_than_one_copy_of_x_holds():
    """A copy of x holds 64 MiB or 64 rows; here there are several."""
    hidden = 262144 + 40
    for dtype in (torch.float16, torch.bfloat16):
        inputs = GatedMLPCase(name="copies", dtype=dtype, rows=(130,), inner=2, hidden=hidden).make_inputs(
            "cpu"
        )
        assert_forward(op(*inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_kept_products_in_blocks(dtype):
    """Weights of 64 MiB and more are multiplied in pieces: here two for fp16 and fp32, one for bf16."""
    hidden, inner = 65536, 300
    x, gate, up, *options = GatedMLPCase(
        name="blocks", dtype=dtype, rows=(3,), inner=inner, hidden=hidden
    ).make_inputs("cpu")
    dy = normal((3, inner), dtype, "cpu", seed=9)
    _, g, u = op_forward(x, gate, up, *options)
    dx, dgate, dup = op_saved_backward(dy, g, u, x, gate, up, *options)
    expected = reference.gated_mlp_backward(dy, x, gate, up, *options)
    for result, wanted in zip((dx, dgate, dup), expected, strict=True):
        error = (result.double() - wanted).norm() / wanted.norm()
        assert error < max(4 * torch.finfo(dtype).eps, RTOL[torch.float32]), error
