"""Which uses of the transform keep attention scores and outputs, and which do not: the rows of docs/semantics §4.2.

Everything in float64, so that "exact" means 1e-12 and a wrong scheme is wrong in the first digit.
"""

import pytest
import torch
from torch import Tensor

from htree_ops.ops.hadamard import grouped_hadamard, hadamard_transform
from htree_ops.reference.hadamard import hadamard_matrix
from htree_ops.reference.tree_attention.rotary import rope_cache, rotate
from tests.support.cases import normal

HEADS, LENGTH, WIDTH = 4, 12, 16
EXACT = 1e-12


def rope(x: Tensor) -> Tensor:
    """x [B, H, S, D] rotated by its positions 0 .. S-1."""
    return rotate(x, *rope_cache(*x.shape[-2:], dtype=x.dtype, device=x.device))


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q [B, H, S, D] times k [B, H, T, D]: [B, H, S, T], unscaled."""
    return q @ k.transpose(-1, -2)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture
def qkv(device):
    q, k, v = normal((3, 2, HEADS, LENGTH, WIDTH), torch.float64, device, seed=0)
    return q, k, v


def test_per_head_after_rope_is_exact(qkv):
    q, k, _ = qkv
    expected = scores(rope(q), rope(k))
    actual = scores(hadamard_transform(rope(q)), hadamard_transform(rope(k)))
    assert relative_error(actual, expected) < EXACT


def test_unnormalised_on_both_multiplies_by_n(qkv):
    q, k, _ = qkv
    expected = scores(rope(q), rope(k))
    actual = scores(hadamard_transform(rope(q), 1.0), hadamard_transform(rope(k), 1.0))
    assert relative_error(actual, WIDTH * expected) < EXACT


def test_only_the_keys_is_wrong(qkv):
    q, k, _ = qkv
    expected = scores(rope(q), rope(k))
    assert relative_error(scores(rope(q), hadamard_transform(rope(k))), expected) > 0.5


def test_before_rope_is_another_model(qkv):
    """The scores agree on the diagonal only, and still depend on the distance alone."""
    q, k, _ = qkv
    expected = scores(rope(q), rope(k))
    actual = scores(rope(hadamard_transform(q)), rope(hadamard_transform(k)))
    diagonal = torch.arange(LENGTH, device=q.device)
    assert relative_error(actual[..., diagonal, diagonal], expected[..., diagonal, diagonal]) < EXACT
    assert relative_error(actual, expected) > 0.5
    same = q[:, :, :1].expand_as(q).contiguous(), k[:, :, :1].expand_as(k).contiguous()
    shifted = scores(*(rope(hadamard_transform(x)) for x in same))
    assert relative_error(shifted[..., 1:, 1:], shifted[..., :-1, :-1]) < EXACT


@pytest.mark.parametrize("group", [2, 4])
def test_grouped_with_scores_per_head_mixes_heads(qkv, group):
    q, k, _ = qkv
    expected = scores(q, k)
    actual = scores(grouped_hadamard(q, group), grouped_hadamard(k, group))
    assert relative_error(actual, expected) > 0.5
    # exactly (1/G) sum over g, g' of H_G[h, g] H_G[h, g'] q_g . k_g'
    h = hadamard_matrix(group, q.device)
    qs, ks = (x.unflatten(1, (HEADS // group, group)) for x in (q, k))
    crossed = torch.einsum("hg,hf,bngsd,bnftd->bnhst", h, h, qs, ks).flatten(1, 2) / group
    assert relative_error(actual, crossed) < EXACT
    per_group = (x.unflatten(1, (HEADS // group, group)).sum(2) for x in (actual, expected))
    assert relative_error(*per_group) < EXACT


@pytest.mark.parametrize("group", [2, 4])
def test_grouped_with_expanded_queries_is_exact(qkv, group):
    """A zero row of G·D with q_h at its head's place, transformed, times the stored row is the score."""
    q, k, _ = qkv
    stored = grouped_hadamard(k, group).unflatten(1, (HEADS // group, group)).transpose(2, 3).flatten(-2)
    h = hadamard_matrix(group, q.device)
    for head in range(HEADS):
        slot = head % group
        expanded = torch.zeros(2, LENGTH, group, WIDTH, dtype=q.dtype, device=q.device)
        expanded[:, :, slot] = q[:, head]
        row = hadamard_transform(expanded.flatten(-2))
        # the same as slices H_G[g, slot] * Hq / sqrt(G), without a transform of length G·D
        slices = hadamard_transform(q[:, head])[:, :, None] * h[:, slot, None] * group**-0.5
        assert relative_error(row, slices.flatten(-2)) < EXACT
        actual = row @ stored[:, head // group].transpose(-1, -2)
        assert relative_error(actual, scores(q, k)[:, head]) < EXACT


@pytest.mark.parametrize("group", [2, 4])
def test_grouped_with_a_full_inverse_is_exact(qkv, group):
    q, k, _ = qkv
    stored = grouped_hadamard(k, group)
    assert relative_error(scores(q, grouped_hadamard(stored, group)), scores(q, k)) < EXACT


def test_inverse_over_the_channels_leaves_the_butterfly_of_the_heads(qkv):
    _, k, _ = qkv
    left = hadamard_transform(grouped_hadamard(k, 2))
    first, second = k[:, 0::2], k[:, 1::2]
    expected = torch.stack((first + second, first - second), dim=2).flatten(1, 2) * 2**-0.5
    assert relative_error(left, expected) < EXACT
    assert relative_error(left, k) > 0.5


@pytest.mark.parametrize("group", [1, 2, 4])
def test_transformed_values_are_restored_once_per_output(qkv, group):
    """O = H (P V'): with groups, a head's weights sum whole rows of the group; its part is then cut out."""
    q, k, v = qkv
    weights = torch.softmax(scores(q, k) * WIDTH**-0.5, dim=-1)
    stored = grouped_hadamard(v, group).unflatten(1, (HEADS // group, group)).transpose(2, 3).flatten(-2)
    rows = weights @ stored.repeat_interleave(group, dim=1)
    restored = hadamard_transform(rows).unflatten(-1, (group, WIDTH))
    slots = torch.arange(HEADS, device=q.device) % group
    actual = restored[:, torch.arange(HEADS, device=q.device), :, slots].transpose(0, 1)
    assert relative_error(actual, weights @ v) < EXACT


def test_padding_is_not_invertible():
    """Padding 12 to 16 with zeros and cutting loses a quarter of a row, so such lengths are refused (§4.1)."""
    x = normal((2000, 12), torch.float64, "cpu", seed=1)

    def padded(y):
        return hadamard_transform(torch.nn.functional.pad(y, (0, 4)))[:, :12]

    assert relative_error(padded(padded(x)), x) == pytest.approx(0.25, abs=0.2)
    assert relative_error(padded(padded(x)), x) > 0.2
    with pytest.raises(ValueError, match="power of two"):
        hadamard_transform(x)


def test_grouped_queries_use_the_slot_of_their_kv_head(device):
    """8 query heads on 4 kv heads in groups of 2: query head h reads kv head h // 2, place (h // 2) % 2."""
    q = normal((1, 8, LENGTH, WIDTH), torch.float64, device, seed=2)
    k = normal((1, 4, LENGTH, WIDTH), torch.float64, device, seed=3)
    stored = grouped_hadamard(k, 2).unflatten(1, (2, 2)).transpose(2, 3).flatten(-2)
    h = hadamard_matrix(2, q.device)
    for head in range(8):
        kv_head = head // 2
        slices = hadamard_transform(q[:, head])[:, :, None] * h[:, kv_head % 2, None] * 2**-0.5
        actual = slices.flatten(-2) @ stored[:, kv_head // 2].transpose(-1, -2)
        assert relative_error(actual, q[:, head] @ k[:, kv_head].transpose(-1, -2)) < EXACT
