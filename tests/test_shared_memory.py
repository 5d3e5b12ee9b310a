"""Mutating ops write to nested views, lazy ones too, unless they share an address with another argument.

See docs/semantics/conventions.md §0.5. The tests know the answer by listing every address.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import htree_ops
from tests.support.tree_attention_problem import packed

op = torch.ops.htree
BUFFER = 60


def addresses(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> list[int]:
    places = itertools.product(*(range(n) for n in size))
    return [offset + sum(i * s for i, s in zip(place, stride, strict=True)) for place in places]


def nested(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether each stride steps over all elements that the smaller ones reach."""
    reach = 0
    for step, count in sorted((s, n) for n, s in zip(size, stride, strict=True) if n > 1):
        if step <= reach:
            return False
        reach += step * (count - 1)
    return True


@st.composite
def views(draw: st.DrawFn, size: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Strides and an offset that stay inside the buffer."""
    stride = tuple(draw(st.integers(0, 8)) for _ in size)
    reach = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if reach >= BUFFER:
        stride, reach = tuple(1 for _ in size), sum(n - 1 for n in size)
    return stride, draw(st.integers(0, BUFFER - 1 - reach))


@st.composite
def pairs(draw: st.DrawFn):
    rows = draw(st.integers(1, 4))
    size = (
        *(draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 1)))),
        rows,
        draw(st.integers(rows, 5)),
    )
    return size, draw(views(size)), draw(views(size))


@given(pairs())
def test_out_is_refused_exactly_where_memory_may_be_shared(case):
    size, (stride, offset), (out_stride, out_offset) = case
    buffer = torch.randn(BUFFER, dtype=torch.float64)
    x, out = buffer.as_strided(size, stride, offset), buffer.as_strided(size, out_stride, out_offset)
    read, written = addresses(size, stride, offset), addresses(size, out_stride, out_offset)
    expected = op.causal_softmax(x)
    assert len(set(written)) == len(written) or not nested(size, out_stride)
    if not nested(size, out_stride):
        with pytest.raises(RuntimeError, match="elements of out must not share memory"):
            op.causal_softmax.out(x, out=out)
    elif read != written and set(read) & set(written):
        with pytest.raises(RuntimeError, match="out must not share memory with x"):
            op.causal_softmax.out(x, out=out)
    else:
        op.causal_softmax.out(x, out=out)
        assert torch.equal(out, expected)


@given(st.data())
def test_in_place_ops_refuse_exactly_what_is_not_nested(data):
    size = data.draw(st.sampled_from([(4,), (3, 4), (2, 3, 4), (1, 2), (5, 1)]))
    stride, offset = data.draw(views(size))
    x = torch.randn(BUFFER, dtype=torch.float64).as_strided(size, stride, offset)
    expected = op.hadamard_transform(x)
    if not nested(size, stride):
        with pytest.raises(RuntimeError, match="hadamard_transform_: elements of x must not share memory"):
            op.hadamard_transform_(x)
    else:
        op.hadamard_transform_(x)
        assert torch.equal(x, expected)


def test_two_storages_of_one_memory():
    numbers = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    with pytest.raises(RuntimeError, match="out must not share memory with x"):
        op.causal_softmax.out(torch.from_numpy(numbers[:4]), out=torch.from_numpy(numbers[1:]))


def test_two_storages_of_the_same_view():
    numbers = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    expected = op.causal_softmax(torch.from_numpy(numbers.copy()))
    op.causal_softmax.out(torch.from_numpy(numbers), out=torch.from_numpy(numbers))
    assert torch.equal(torch.from_numpy(numbers), expected)


@pytest.mark.parametrize("size", [(3000, 1, 2), (2, 5, 600)])
def test_columns_of_one_buffer_are_apart_at_any_size(size):
    batch, rows, cols = size
    buffer = torch.randn(batch, rows, 2 * cols)
    expected = op.causal_softmax(buffer[..., 0::2])
    op.causal_softmax.out(buffer[..., 0::2], out=buffer[..., 1::2])
    assert torch.equal(buffer[..., 1::2], expected)
    with pytest.raises(RuntimeError, match="out must not share memory with x"):
        op.causal_softmax.out(buffer[..., :cols], out=buffer[..., 1 : cols + 1])


def test_many_matrices_may_lie_in_one_buffer():
    buffer = torch.zeros(70_000, 2, 1, 2)
    op.causal_softmax.out(buffer[:, 0], out=buffer[:, 1])
    assert buffer[69_999, 1, 0].tolist() == [0.5, 0.5]
    with pytest.raises(RuntimeError, match="out must not share memory with x"):
        op.causal_softmax.out(buffer[1:, 0], out=buffer[:-1, 0])


def test_strange_strides_end_in_bounded_time():
    """Strides that fit no strides of out make the search long; it then stops and reports sharing."""
    buffer = torch.zeros(8_000_000)
    x = buffer.as_strided((64, 64, 64), (60022, 20014, 6002))
    out = buffer.as_strided((64, 64, 64), (59978, 898, 14), 1)
    with pytest.raises(RuntimeError, match="out must not share memory with x"):
        op.causal_softmax.out(x, out=out)


def test_meta_tensors_are_checked_too():
    with pytest.raises(RuntimeError, match="elements of x must not share memory"):
        op.hadamard_transform_(torch.empty(1, 4, device="meta").expand(3, 4))
    with pytest.raises(RuntimeError, match="elements of out must not share memory"):
        op.causal_softmax.out(
            torch.empty(3, 4, device="meta"), out=torch.empty(1, 4, device="meta").expand(3, 4)
        )
    flat = torch.empty(100, device="meta")
    with pytest.raises(RuntimeError, match="out must not share memory with x"):
        op.causal_softmax.out(flat[:64].view(8, 8), out=flat[8:72].view(8, 8))
    op.causal_softmax.out(flat[:36].view(6, 6), out=flat[36:72].view(6, 6))


# ---- lazy views


def tree_cache_step(x: Tensor) -> None:
    """Two tokens into an empty cache of packed tokens, with ``x`` as the tail of keys, which stands in a list."""
    cache = htree_ops.TreeKVCache(
        1, 1, 64, 8, compression_rate=4, page_size=4, leaf_bits=8, dtype=torch.float32, device=x.device
    )
    packed = cache.pools.leaves
    leaves = [x.view(1, 1, 4, 64) if y is packed.k_tail else y for y in cache.pools.written]
    new = [torch.ones(1, 2, 1, 64, device=x.device) for _ in range(2)]
    counts, cu = (torch.tensor(y, dtype=torch.int32, device=x.device) for y in ([2], [0, 2]))
    pools = (cache.k_pool, cache.v_pool, leaves, [], cache._state, cache.block_table)
    op._tree_cache_step_(
        *pools, None, *new, None, None, counts, False, cu, None, 8, 4, *cache.options.packed()
    )


MUTATING = {
    "causal_softmax_": lambda x: op.causal_softmax_(x),
    "causal_softmax.out": lambda x: op.causal_softmax.out(x, out=x),
    "hadamard_transform_": lambda x: op.hadamard_transform_(x),
    "mask_topk_scores_": lambda x: op.mask_topk_scores_(
        x.view(1, 1, 1, 4, 4), torch.tensor([2, -1], dtype=torch.int32, device=x.device).view(1, 1, 1, 2)
    ),
    "merge_to_global_": lambda x: op.merge_to_global_(
        torch.zeros(1, 1, 4, device=x.device),
        torch.ones(1, 1, 4, device=x.device),
        x.view(1, 1, 4, 4),
        *(torch.ones(1, 1, 4, device=x.device) for _ in range(2)),
        torch.ones(1, 1, 4, 4, device=x.device),
    ),
    "_tree_cache_append_": lambda x: op._tree_cache_append_(
        *(torch.zeros(1, 1, 2, 64, device=x.device) for _ in range(2)),
        [
            *(
                torch.zeros(1, 1, 4, *more, dtype=dtype, device=x.device)
                for more, dtype in 2 * (((64,), torch.uint8), ((), torch.float16))
            ),
            x.view(1, 1, 4, 64),
            torch.zeros(1, 1, 4, 64, device=x.device),
        ],
        *(torch.ones(2, 1, 64, device=x.device) for _ in range(2)),
        torch.zeros(1, 1, dtype=torch.int32, device=x.device),
        torch.zeros(1, dtype=torch.int32, device=x.device),
        torch.tensor([0, 2], dtype=torch.int32, device=x.device),
        None,
        None,
        4,
        *packed(2, 2),
    ),
    "_tree_cache_step_": tree_cache_step,
    "tree_cache_copy_": lambda x: op.tree_cache_copy_(
        x.view(2, 1, 2, 4),
        torch.zeros(2, 1, 2, 4, device=x.device),
        torch.tensor([[0], [1]], dtype=torch.int32, device=x.device),
    ),
}
#: Of what an op is tried on, where that is not 4 by 4.
SIZES = {"_tree_cache_append_": (4, 64), "_tree_cache_step_": (4, 64)}
#: These write integers alone, and a view of those is never lazy.
MUTATING_INTEGERS = {"_tree_cache_pack_prompt_", "_tree_cache_truncate_"}


def negated(values: Tensor) -> Tensor:
    view = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert view.is_neg()
    assert torch.equal(view, values)
    return view


@pytest.mark.parametrize("name", MUTATING)
def test_views_with_a_lazy_sign(name, device):
    """Torch negates such a view when it is read: the op must see its values and write values back."""
    values = torch.randn(SIZES.get(name, (4, 4)), device=device)
    expected = values.clone()
    MUTATING[name](expected)
    for _ in range(20):
        view = negated(values)
        version = view._version
        MUTATING[name](view)
        assert torch.equal(view, expected)
        assert view._version > version


def test_the_list_of_mutating_ops_is_whole():
    schemas = torch._C._jit_get_schemas_for_operator
    names = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("htree::")}
    mutable = {
        ".".join(filter(None, (s.name.split("::")[1], s.overload_name)))
        for n in {n.split(".")[0] for n in names}
        for s in schemas(n)
        if s.is_mutable
    }
    assert mutable == set(MUTATING) | MUTATING_INTEGERS


@pytest.mark.parametrize("name", ["causal_softmax_", "hadamard_transform_", "causal_softmax.out"])
def test_conjugated_views_are_refused_like_any_complex_tensor(name, device):
    with pytest.raises(TypeError, match="must have dtype"):
        MUTATING[name](torch.zeros(4, 4, dtype=torch.complex64, device=device).conj())


def test_a_lazy_output_beside_a_plain_input(device):
    x = torch.randn(4, 4, device=device)
    out = negated(torch.zeros(4, 4, device=device))
    assert torch.equal(htree_ops.causal_softmax(x, out=out), htree_ops.causal_softmax(x))
