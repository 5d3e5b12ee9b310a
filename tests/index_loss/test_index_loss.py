"""The loss of an index: values, gradients and the properties of docs/semantics/index_loss.md §9.3."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import htree_ops
from htree_ops import index_loss
from htree_ops.reference import index_loss as reference
from htree_ops.reference import selection
from tests.support.cases import normal
from tests.support.devices import poisoned_memory
from tests.support.documents import offsets
from tests.support.index_loss_cases import CASES, FAST_CASES, IndexLossCase
from tests.support.layouts import LAYOUTS
from tests.support.select_blocks_cases import integers

OPS = torch.ops.htree
seeds = st.integers(0, 2**20)


def named(name: str, cases: Sequence[IndexLossCase] = CASES) -> IndexLossCase:
    return next(case for case in cases if case.name == name)


def with_gradients(call: Any, inputs: Sequence[Any], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and its gradients for index_query and index_key."""
    leaves = [x.detach().requires_grad_() if i in (2, 3) else x for i, x in enumerate(inputs)]
    loss = call(*leaves, **options)
    return loss.detach(), *torch.autograd.grad(loss, leaves[2:4])


def in_double(inputs: Sequence[Any]) -> list[Any]:
    """The same numbers in float64 on the CPU."""
    return [
        x if x is None else x.detach().cpu().double() if x.is_floating_point() else x.cpu() for x in inputs
    ]


#: Of the loss: §9.3. Of a gradient: that times its largest element, and the rounding to its dtype.
LOSS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def assert_equal_to_reference(case: IndexLossCase, device: str, seed: int = 0) -> None:
    inputs = case.make_inputs(device, seed)
    found = with_gradients(OPS.index_loss, inputs, **case.options())
    wanted = with_gradients(reference.index_loss, in_double(inputs), **case.options())
    state = torch.float64 if case.dtype == torch.float64 else torch.float32
    assert found[0].dtype == state
    assert found[0].shape == ()
    for name, ours, theirs in zip(("loss", "d_index_query", "d_index_key"), found, wanted, strict=True):
        error = LOSS[case.dtype]
        if name == "loss":
            atol, rtol = error * max(1.0, theirs.abs().item()), 0.0
        else:
            assert ours.dtype == case.dtype
            # p and the softmax of a row, at most 1, err by as much, times the other side's elements.
            largest = max(x.abs().max().item() for x in inputs[2:4]) / (case.B * case.H_i)
            atol = error * (0.5 * largest + 20 * theirs.abs().max().item())
            rtol = ROUNDING[case.dtype]
            if case.dtype == torch.float16:
                atol += 2**-25  # half of the smallest number
        torch.testing.assert_close(
            ours.double().cpu(), theirs, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


@st.composite
def problems(draw: Any, device: str) -> IndexLossCase:
    fast = device == "cuda" and draw(st.booleans())
    block_size = draw(st.sampled_from((16, 32, 48)) if fast else st.integers(1, 20))
    kv_heads = draw(st.integers(1, 3))
    dtypes = (torch.bfloat16, torch.float16, torch.float32, *((torch.float64,) if device == "cpu" else ()))
    lengths = draw(st.none() | st.lists(st.integers(0, 6 * block_size), min_size=1, max_size=6))
    if lengths is not None:
        lengths[draw(st.integers(0, len(lengths) - 1))] = block_size + draw(st.integers(1, 4 * block_size))
    return IndexLossCase(
        name="drawn",
        dtype=draw(st.sampled_from(dtypes[:2] if fast else dtypes)),
        B=draw(st.integers(1, 3)) if lengths is None else 1,
        T=block_size + draw(st.integers(1, 8 * block_size)),
        rows=draw(st.integers(1, 12)),
        H=kv_heads * draw(st.integers(1, 9)),
        H_kv=kv_heads,
        H_i=draw(st.sampled_from((1, kv_heads))),
        K=16 * draw(st.integers(1, 16)) if fast else draw(st.integers(1, 20)),
        d=16 * draw(st.integers(1, 8)),
        block_size=block_size,
        scale=draw(st.none() | st.floats(-1.5, 1.5)),
        shared=draw(st.booleans()),
        lengths=None if lengths is None else tuple(lengths),
        spare=draw(st.integers(0, 20)),
    )


# ---- values and gradients


@pytest.mark.parametrize("case", [*CASES, *FAST_CASES], ids=lambda case: case.id)
def test_equal_to_the_reference(case, device):
    if device == "cuda" and case.dtype == torch.float64:
        with pytest.raises(TypeError, match=r"query must have dtype .* on CUDA, got torch.float64"):
            OPS.index_loss(*case.make_inputs(device), **case.options())
    else:
        assert_equal_to_reference(case, device)


@given(data=st.data(), seed=seeds)
def test_any_problem_equals_the_reference(data, seed, device):
    case = data.draw(problems(device))
    with poisoned_memory():
        assert_equal_to_reference(case, device, seed)


@pytest.mark.parametrize("name", ["plain", "one_index_head", "odd_width", "block16", "repeated", "ragged"])
def test_gradcheck(name):
    case = named(name)
    lengths = None if case.lengths is None else (9, 0, 14)
    small = replace(case, dtype=torch.float64, B=1, rows=3, T=case.block_size + 9, lengths=lengths)
    inputs = small.make_inputs("cpu")
    leaves = [x.requires_grad_() for x in inputs[2:4]]
    options = case.options()
    assert torch.autograd.gradcheck(
        lambda *index: OPS.index_loss(*inputs[:2], *index, *inputs[4:], **options), leaves
    )


@pytest.mark.parametrize("name", ["plain", "one_index_head", "many_heads"])
def test_the_masses_themselves_have_no_loss(name, device):
    """An index whose scores are the logarithms of the masses: one head, one token of a block tells its score."""
    case = replace(named(name), H=1, H_kv=1, H_i=1, B=1, block_size=1, K=16, rows=20)
    query, key, _, _, positions, _ = case.make_inputs(device)
    loss, *gradients = with_gradients(
        OPS.index_loss, (query, key, query * 16**-0.5, key, positions), block_size=1
    )
    assert abs(loss.item()) < 1e-6
    assert all(g.abs().max().item() < 1e-6 for g in gradients)


def test_scores_are_those_of_select_blocks(device):
    """With queries of zeros the attention counts tokens alone, and the loss follows from the scores."""
    case = replace(named("plain"), B=1, rows=1)
    _, key, index_query, index_key, _, _ = case.make_inputs(device)
    scores = selection.block_scores(index_query, index_key, case.block_size)[0]  # [T, H_i, blocks]
    for token in (4, 30, 69):
        blocks = token // case.block_size
        guess = scores[token, :, :blocks].log_softmax(-1)
        wanted = (-math.log(blocks) - guess.mean(-1)).mean()
        positions = torch.tensor([token], device=device)
        zeros = key.new_zeros(1, case.T, case.H, case.K)
        found = OPS.index_loss(zeros, key, index_query, index_key, positions, block_size=case.block_size)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@given(seed=seeds, data=st.data())
def test_a_maximum_is_that_of_its_first_token(seed, data, device):
    """Small whole numbers: many products of a block are equal. Other tokens get no gradient, bit for bit."""
    size = data.draw(st.sampled_from((2, 5, 16, 32)))
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)))
    case = replace(named("plain"), block_size=size, T=5 * size, rows=3, B=1, H=2, H_kv=1, H_i=1, dtype=dtype)
    query, key, *_ = case.make_inputs(device, seed)
    index = [integers((1, case.T, 1, 16), dtype, device, seed + i) for i in range(2)]
    positions = case.make_positions(device, seed)
    _, _, of_key = with_gradients(OPS.index_loss, (query, key, *index, positions), block_size=size)
    products = torch.einsum("thd,shd->ts", *(x[0].double() for x in index))
    allowed = torch.zeros(case.T, dtype=torch.bool)
    for token in positions.flatten().tolist():
        blocks = products[token, : token // size * size].unflatten(0, (-1, size)).cpu()
        allowed[torch.arange(len(blocks)) * size + blocks.argmax(-1)] = True
    assert not of_key[0, ~allowed.to(device)].any()
    assert of_key.isfinite().all()


# ---- what a loss depends on


@given(data=st.data(), seed=seeds)
def test_order_of_positions_changes_no_bit(data, seed, device):
    case = replace(data.draw(problems(device)), B=1)
    *tensors, positions, cu = case.make_inputs(device, seed)
    shuffled = positions[
        ..., torch.randperm(case.rows, generator=torch.Generator().manual_seed(seed)).to(device)
    ]
    ours = with_gradients(OPS.index_loss, (*tensors, positions, cu), **case.options())
    theirs = with_gradients(OPS.index_loss, (*tensors, shuffled, cu), **case.options())
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["plain", "one_index_head", "fast", "block64"])
def test_tokens_from_the_diagonal_block_on_change_no_bit(name, device):
    case = named(name, [*CASES, *FAST_CASES])
    inputs = replace(case, B=1).make_inputs(device)
    last = int(inputs[4].max()) // case.block_size * case.block_size
    spoilt = [x.clone() for x in inputs[:4]]
    for x in (spoilt[1], spoilt[3]):
        x[:, last:] = torch.nan
    ours = with_gradients(OPS.index_loss, inputs, **case.options())
    theirs = with_gradients(OPS.index_loss, (*spoilt, *inputs[4:]), **case.options())
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["ragged", "one_document", "documents", "documents64"])
def test_documents_are_calls_of_their_own(name, device):
    case = replace(named(name, [*CASES, *FAST_CASES]), dtype=torch.float32)
    *tensors, positions, cu = case.make_inputs(device)
    found = with_gradients(OPS.index_loss, (*tensors, positions, cu), **case.options())
    total, wanted = 0.0, [torch.zeros_like(x) for x in tensors[2:]]
    ends = cu.tolist()
    for start, end in itertools.pairwise(ends):
        mine = positions[(positions >= start) & (positions < end)] - start
        if len(mine) == 0:
            continue
        one = [x[None, start:end] for x in tensors]
        loss, *gradients = with_gradients(OPS.index_loss, (*one, mine), **case.options())
        share = len(mine) / case.rows
        total += share * loss.item()
        for whole, part in zip(wanted, gradients, strict=True):
            whole[start:end] += share * part[0]
    assert abs(found[0].item() - total) < 1e-5
    for ours, theirs in zip(found[1:], wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["plain", "ragged", "fast", "documents"])
def test_same_bits_every_time(name, device):
    case = named(name, [*CASES, *FAST_CASES])
    inputs = case.make_inputs(device)
    first = with_gradients(OPS.index_loss, inputs, **case.options())
    for _ in range(3):
        again = with_gradients(OPS.index_loss, inputs, **case.options())
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["plain", "fast"])
def test_any_strides(layout, name, device):
    case = named(name, [*CASES, *FAST_CASES])
    inputs = case.make_inputs(device)
    views = [LAYOUTS[layout](x) for x in inputs[:4]]
    ours = with_gradients(OPS.index_loss, inputs, **case.options())
    leaves = [x.requires_grad_() for x in views[2:4]]
    loss = OPS.index_loss(*views[:2], *leaves, *inputs[4:], **case.options())
    theirs = (loss.detach(), *torch.autograd.grad(loss, leaves))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_rows_far_apart_in_memory(device):
    """Offsets beyond 2^31 elements, on memory that is never touched between the rows."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    T, step = 64, 2**31 // 60
    wide = torch.empty(T * step, dtype=torch.bfloat16, device=device)
    case = IndexLossCase(name="far", dtype=torch.bfloat16, T=T, rows=4, H=2, H_kv=1, H_i=1, block_size=16)
    query, key, index_query, index_key, positions, _ = case.make_inputs(device)
    far = wide.as_strided((1, T, 1, 16), (0, step, 16, 1))
    far.copy_(key)
    ours = OPS.index_loss(query, far, index_query, index_key, positions)
    assert torch.equal(ours, OPS.index_loss(query, key, index_query, index_key, positions))


# ---- special values


@pytest.mark.parametrize("name", ["plain", "fast"])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_is_seen(name, which, value, device):
    case = replace(named(name, [*CASES, *FAST_CASES]), B=1, rows=1)
    inputs = [x if x is None else x.clone() for x in case.make_inputs(device)]
    token = case.T - 1
    inputs[4] = torch.tensor([token], device=device)
    inputs[0][..., 3].abs_()  # a score of -inf would hide a block, which is a number
    inputs[which][0, token if which in (0, 2) else 1, :, 3] = value
    wanted = reference.index_loss(*in_double(inputs), **case.options())
    found = OPS.index_loss(*inputs, **case.options())
    assert found.isnan().item() or not found.isfinite().item()
    assert wanted.isnan().item() == found.isnan().item()


@pytest.mark.parametrize("name", ["plain", "fast"])
def test_large_scores_do_not_overflow(name, device):
    case = replace(named(name, [*CASES, *FAST_CASES]), dtype=torch.bfloat16)
    query, key, index_query, index_key, positions, _ = case.make_inputs(device)
    inputs = (query * 64, key * 64, index_query * 30, index_key * 30, positions)
    loss, *gradients = with_gradients(OPS.index_loss, inputs, **case.options())
    wanted, *_ = with_gradients(reference.index_loss, in_double(inputs), **case.options())
    torch.testing.assert_close(loss.double().cpu(), wanted, rtol=1e-4, atol=1e-3)
    assert all(g.isfinite().all() for g in gradients)


def test_a_score_of_minus_infinity_that_should_have_mass_is_an_infinite_loss(device):
    case = replace(named("plain"), B=1, H_i=1)
    query, key, index_query, index_key, _, _ = case.make_inputs(device)
    index_query, index_key = index_query.abs(), index_key.abs()
    index_key[:, 4:8] = -torch.inf
    loss = OPS.index_loss(query, key, index_query, index_key, torch.tensor([60], device=device), block_size=4)
    assert loss.item() == math.inf


def test_no_positions_and_no_sequences_have_no_loss(device):
    case = named("plain")
    *tensors, positions, _ = case.make_inputs(device)
    for inputs in ((*tensors, positions[:, :0]), (*(x[:0] for x in tensors), positions[:0])):
        loss, *gradients = with_gradients(OPS.index_loss, inputs, block_size=4)
        assert loss.item() == 0.0
        assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("position", [-1, 3, 0, 70, 2**40, -(2**62)])
def test_a_position_without_an_earlier_block(position, device):
    """A ValueError on the CPU; on CUDA it is left out, which changes no other position's share."""
    case = replace(named("plain"), B=1)
    *tensors, positions, _ = case.make_inputs(device)
    spoilt = torch.cat((positions[0], positions.new_tensor([position])))
    if device == "cpu":
        with pytest.raises(ValueError, match=f"index_loss: positions must .*, got {position}"):
            OPS.index_loss(*tensors, spoilt, block_size=4)
        return
    ours = with_gradients(OPS.index_loss, (*tensors, positions), block_size=4)
    theirs = with_gradients(OPS.index_loss, (*tensors, spoilt), block_size=4)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)
    loss, *gradients = with_gradients(OPS.index_loss, (*tensors, spoilt[-1:]), block_size=4)
    assert loss.item() == 0.0
    assert not any(g.any() for g in gradients)


def test_padding_behind_documents_is_no_position(device):
    *tensors, positions, cu = named("ragged").make_inputs(device)
    padding = positions.new_tensor([int(cu[-1])])
    if device == "cpu":
        with pytest.raises(ValueError, match="index_loss: positions must be tokens of the documents"):
            OPS.index_loss(*tensors, padding, cu, block_size=4)
    else:
        assert OPS.index_loss(*tensors, padding, cu, block_size=4).item() == 0.0


# ---- the function draws positions


@pytest.mark.parametrize("name", ["plain", "ragged"])
def test_the_function_draws_as_the_generator_says(name, device):
    case = named(name)
    *tensors, _, cu = case.make_inputs(device)

    def draw(seed):
        generator = torch.Generator(device=device).manual_seed(seed)
        return index_loss(*tensors, block_size=4, rows=32, generator=generator, cu_seqlens=cu)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    cpu = torch.Generator().manual_seed(1)
    assert index_loss(*tensors, block_size=4, generator=cpu, cu_seqlens=cu).device.type == device


@given(data=st.data(), seed=seeds)
def test_drawn_positions_have_an_earlier_block_and_all_can_be_drawn(data, seed, device):
    from htree_ops.ops.index_loss.function import draw_positions

    case = data.draw(problems(device))
    query, key, *_ = case.make_tensors(device)
    generator = torch.Generator().manual_seed(seed)
    rows = 40 * len(case.eligible())
    drawn = draw_positions(query, key, rows, case.block_size, generator, case.make_offsets(device))
    assert drawn.dtype == torch.int64
    assert drawn.shape == ((rows,) if case.lengths is not None else (case.B, rows))
    found = set(drawn.flatten().tolist())
    assert found <= set(case.eligible())
    assert len(found) >= 0.9 * len(case.eligible())


def test_given_positions_are_those_of_the_op(device):
    *tensors, positions, _ = named("plain").make_inputs(device)
    ours = index_loss(*tensors, positions=positions, block_size=4, scale=0.3)
    assert torch.equal(ours, OPS.index_loss(*tensors, positions, block_size=4, scale=0.3))


def test_sequences_share_positions_of_one_dimension(device):
    *tensors, positions, _ = named("shared").make_inputs(device)
    ours = index_loss(*tensors, positions=positions, block_size=4)
    assert torch.equal(ours, index_loss(*tensors, positions=positions.expand(2, -1), block_size=4))


def test_fitting_an_index_lowers_the_loss(device):
    """An index of the width of the heads can be the attention of one head; a few steps bring it near."""
    torch.manual_seed(0)
    query, key = (normal((1, 256, 1, 16), torch.float32, device, i) for i in range(2))
    index = [normal((1, 256, 1, 16), torch.float32, device, i + 2).requires_grad_() for i in range(2)]
    positions = torch.arange(16, 256, device=device)
    optimizer = torch.optim.Adam(index, lr=0.05)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = index_loss(query, key, *index, positions=positions)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.gpu
def test_memory_at_a_million_tokens():
    """§9.3: at most 256 MB beside arguments and gradients."""
    T = 2**20
    query, key = (torch.zeros(1, T, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2))
    index = [
        torch.zeros(1, T, 2, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(2)
    ]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    positions = torch.randint(16, T, (512,), device="cuda")
    gradients = torch.autograd.grad(index_loss(query, key, *index, positions=positions), index)
    kept = sum(g.nbytes for g in gradients)
    assert torch.cuda.max_memory_allocated() - before - kept < 256 * 2**20


@pytest.mark.gpu
def test_ranges_of_blocks_change_no_more_than_rounding():
    """So many positions that the masses of all blocks are not held at once."""
    case = IndexLossCase(
        name="ranges",
        dtype=torch.bfloat16,
        B=4,
        T=20_000,
        rows=1500,
        H=8,
        H_kv=4,
        H_i=4,
        K=64,
        d=16,
        block_size=16,
    )
    inputs = case.make_inputs("cuda")
    found = with_gradients(OPS.index_loss, inputs, **case.options())
    total, of_query, of_key = 0.0, [], []
    for b in range(4):
        loss, *gradients = with_gradients(
            OPS.index_loss, [x if x is None else x[b : b + 1] for x in inputs], **case.options()
        )
        total += loss.item() / 4
        of_query.append(gradients[0].float() / 4)
        of_key.append(gradients[1].float() / 4)
    assert abs(found[0].item() - total) < 1e-5
    for ours, parts in zip(found[1:], (of_query, of_key), strict=True):
        theirs = torch.cat(parts)
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-7, atol=1e-4 * theirs.abs().max().item())


def test_the_package_exports_it():
    assert htree_ops.index_loss is index_loss
    assert offsets((3,), "cpu").dtype == torch.int32
