"""What CompressedKVCache refuses, and that a refusal does not change it (docs/semantics/compressed_kv.md §4.6)."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_kv_helpers import (
    BATCH,
    HEADS,
    KINDS,
    WIDTH,
    assert_same_content,
    compressed_length,
    make,
    tokens,
)

from htree_ops import CompressedKVCache
from htree_ops.errors import DeviceError, OutOfPagesError, ShapeMismatchError, UnsupportedDtypeError
from tests.support.cases import normal


def test_a_state_of_another_cache_is_refused(device):
    cache = make(device)
    cache.append(*tokens(device, 60))
    state = cache.state_dict()
    with pytest.raises(
        TypeError, match=r"load_state_dict: dtype must be torch\.float16, that of the state, got"
    ):
        make(device, dtype=torch.bfloat16).load_state_dict(state)
    for changes, message in (
        ({"bits": 4}, r"bits of the state must be that of the cache, \(4, 4\), got \(8, 8\)"),
        ({"chunk": 8}, "chunk of the state must be that of the cache, 8, got 16"),
        ({"hadamard_group": 1}, "hadamard_group of the state must be that of the cache, 1, got 0"),
        ({"batch": 2}, r"compressed of the state must be \[2\], got \(3,\)"),
        (
            {"capacity": 59},
            r"compressed \+ dense of the state must lie between 0 and 59 in this cache of 59 tokens, got",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make(device, **changes).load_state_dict(state)
    with pytest.raises(OutOfPagesError, match="more pages of 16 tokens are needed than the 8 of the pool"):
        make(device, page_size=16, num_pages=8).load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_no_cache_gives_is_refused(kind):
    cache = make("cpu", **KINDS[kind])
    cache.append(*tokens("cpu", 60))
    cache.key_weight = torch.ones(BATCH, HEADS, WIDTH)
    state = cache.state_dict()
    of_rows = ("k_bitmap", "k_values", "k_scales", "v_bitmap", "v_values", "v_scales")
    numbers = torch.tensor
    wrong: list[tuple[str, Any]] = [
        ("compressed", numbers(x)) for x in ([48.0] * 3, [-16] * 3, [128] * 3, 48)
    ]
    wrong += [("compressed", [48] * 3)]
    wrong += [("dense", numbers(x)) for x in ([22] * 3, [-1] * 3, [True] * 3, [12, 12])] + [("dense", None)]
    wrong += [("key_weight", x) for x in (torch.ones(3), -torch.ones(BATCH, HEADS, WIDTH), None)]
    wrong += [("options", x) for x in (1, state["options"][1:], state["options"].int(), None)]
    for name in (*of_rows, "k_win", "v_win"):
        x = state[name]
        wrong += [(name, x[:1]), (name, x[:, :1]), (name, x[0])]
        wrong += [(name, x[:, :, :3])] if x.shape[2] else [(name, x.new_zeros(*x.shape[:2], 48))]
        wrong += [(name, x[..., :-1])] if x.dim() == 4 else []
    wider = torch.nn.functional.pad(state["v_win"], (0, 0, 0, 1))
    wrong += [("k_win and v_win", wider)]
    full = make("cpu", **KINDS[kind])
    full.append(*tokens("cpu", 7, seed=3))
    before = copy.deepcopy(full)
    for name, value in wrong:
        with pytest.raises((TypeError, ValueError), match=name):
            full.load_state_dict(state | {name.split()[-1]: value})
    for name in (*of_rows, "k_win", "v_win"):
        for value in (state[name].double(), None):
            with pytest.raises(TypeError, match=f"{name} of the state must be a Tensor of "):
                full.load_state_dict(state | {name: value})
    for name in state:
        with pytest.raises(ValueError, match=f"state must have {name}, got "):
            full.load_state_dict({n: x for n, x in state.items() if n != name})
        with pytest.raises(DeviceError, match=f"{name} of the state must be .* got meta"):
            full.load_state_dict(state | {name: state[name].to("meta")})
        with pytest.raises(TypeError, match=f"{name} of the state must be a dense tensor"):
            full.load_state_dict(state | {name: state[name].to_sparse()})
    with pytest.raises(ValueError, match="num_kv_heads of the state must be that of the cache, 4, got 0"):
        full.load_state_dict(state | {"options": state["options"] - 4})
    with pytest.raises(TypeError, match="state must be a dict, got list"):
        full.load_state_dict([])
    assert_same_content(full, before)
    full.load_state_dict(state)
    for weight in (cache.key_weight, state["key_weight"]):
        weight.zero_()
    assert full.key_weight.all(), "the state is copied"


def test_key_weights_are_checked_before_anything_happens(device):
    cache = make(device)
    k, v = tokens(device, 60)
    good = torch.ones(BATCH, HEADS, WIDTH, device=device)
    for weight, kind, message in (
        (good[0], ShapeMismatchError, "key_weight must be 3-D"),
        (good[:, :1], ShapeMismatchError, r"key_weight must be \[3, 4, 64\], got \(3, 1, 64\)"),
        (good.int(), UnsupportedDtypeError, "key_weight must have dtype"),
        (good.to("meta"), DeviceError, "key_weight must be on the device of the cache"),
        ([1.0], TypeError, "key_weight must be a Tensor, got list"),
    ):
        with pytest.raises(kind, match=message):
            cache.key_weight = weight
    assert cache.key_weight is None
    if device != "cpu":
        return  # on a GPU the sign is not checked
    with pytest.raises(ValueError, match="key_weight must not be negative, got -1"):
        cache.key_weight = -good
    cache.append(k[:, :15], v[:, :15])
    cache.key_weight = good
    good.neg_()
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=r"append: key_weight must not be negative"):
        cache.append(k[:, 15:], v[:, 15:])
    assert_same_content(cache, before)
    cache.append(k[:, 15:18], v[:, 15:18])  # compresses nothing


def test_the_next_sequence_begins_without_the_weights_of_the_last(device):
    cache = make(device)
    given = 2 * torch.ones(BATCH, HEADS, WIDTH, device=device)
    cache.key_weight = given
    cache.free(1)
    assert cache.key_weight[:, 0, 0].tolist() == [2, 1, 2]
    assert bool((given == 2).all()), "the tensor is the caller's"
    cache.reset()
    assert cache.key_weight is None


def assert_goes_on(cache: CompressedKVCache, k: torch.Tensor, v: torch.Tensor) -> None:
    """A cache of 21 tokens with a full window takes the last one of k and v."""
    cache.settle()
    cache.write_token(k[:, 21:], v[:, 21:])
    cache.advance()
    whole = make(str(cache.device))
    whole.prefill(k, v)
    assert_same_content(cache, whole)


def test_a_single_token_is_checked(device):
    cache = make(device)
    k, v = tokens(device, 22)
    one, other = k[:, :1], v[:, :1]
    for new, kind, message in (
        ((one[:, :, :1], other[:, :, :1]), ShapeMismatchError, r"write_token: k must be \[3, S, 4, 64\]"),
        ((one[..., :1], other[..., :1]), ShapeMismatchError, r"write_token: k must be \[3, S, 4, 64\]"),
        ((one[:2], other[:2]), ShapeMismatchError, r"write_token: k must be \[3, S, 4, 64\]"),
        ((one[0, 0, 0], other), ShapeMismatchError, "write_token: k must be 4-D"),
        (
            (k[:, :2], v[:, :2]),
            ShapeMismatchError,
            r"k must be one token \[3, 1, 4, 64\], got \(3, 2, 4, 64\)",
        ),
        ((one.float(), other.float()), UnsupportedDtypeError, "write_token: k must have dtype"),
        (
            (one.to("meta"), other.to("meta")),
            DeviceError,
            "write_token: k must be on the device of the cache",
        ),
        ((None, other), TypeError, "k must be a Tensor"),
    ):
        with pytest.raises(kind, match=message):
            cache.write_token(*new)
    cache.append(k[:, :21], v[:, :21])
    with pytest.raises(ValueError, match=r"write_token: the window is full; settle\(\)"):
        cache.write_token(one, other)
    assert cache.win_len.tolist() == [21] * BATCH
    assert_goes_on(cache, k, v)
    for capacity in (3, 22):
        small = make(device, capacity=capacity)
        small.append(k[:, :capacity], v[:, :capacity])
        small.settle()
        with pytest.raises(ValueError, match=f"write_token: sequence 0 holds {capacity} tokens; 1 more"):
            small.write_token(one, other)
    small.win_len += 1  # what a graph does that is replayed once too often
    with pytest.raises(ValueError, match="advance: sequence 0 holds 22 tokens"):
        small.advance()
    assert small.win_len.tolist() == [6] * BATCH


def test_a_token_behind_a_full_window_is_not_counted(device):
    cache = make(device)
    k, v = tokens(device, 22)
    cache.append(k[:, :21], v[:, :21])
    before = copy.deepcopy(cache)
    cache.win_len += 1  # what a graph does that is replayed before settle()
    with pytest.raises(ValueError, match=r"advance: the window is full; settle\(\)"):
        cache.advance()
    assert_same_content(cache, before)
    assert cache.lengths.tolist() == cache.host_lengths() == [21] * BATCH
    assert_goes_on(cache, k, v)


def test_a_token_that_fills_the_window_waits_for_a_page(device):
    k, v = tokens(device, 21)
    cache, whole = (make(device, page_size=16, num_pages=pages) for pages in (2, None))
    cache.append(k[:, :20], v[:, :20])
    cache.write_token(k[:, 20:], v[:, 20:])
    with pytest.raises(OutOfPagesError, match=r"CompressedKVCache\.advance: 1 more pages of 16 tokens"):
        cache.advance()
    assert cache.lengths.tolist() == cache.host_lengths() == [21] * BATCH
    cache.free(2)
    cache.settle()
    whole.prefill(k, v, [21, 21, 0])
    assert_same_content(cache, whole)


@pytest.mark.parametrize("name", ["k", "v"])
def test_sparse_tokens_do_not_settle_the_cache(name):
    cache = make("cpu")
    cache.append(*tokens("cpu", 21))  # the window is full
    new = dict(zip("kv", tokens("cpu", 1, seed=3), strict=True))
    new[name] = new[name].to_sparse()
    before = copy.deepcopy(cache)
    q = normal((BATCH, 1, 8, WIDTH), torch.float16, "cpu", seed=15)
    for method, call in (
        ("append", cache.append),
        ("decode", lambda k, v: cache.decode(q, k, v)),
        ("prefill", cache.prefill),
        ("write_token", cache.write_token),
    ):
        message = rf"CompressedKVCache\.{method}: {name} must be a dense tensor, got layout torch\.sparse_coo"
        with pytest.raises(TypeError, match=message):
            call(new["k"], new["v"])
    assert_same_content(cache, before)
    assert cache.compressed_lengths == before.compressed_lengths


def test_numbers_that_cannot_be_read():
    cache = make("cpu")
    k, v = tokens("cpu", 21)
    cache.append(k, v)
    before = copy.deepcopy(cache)
    q = normal((BATCH, 21, 8, WIDTH), torch.float16, "cpu", seed=15)
    calls: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "append": ("lengths", lambda n: cache.append(k, v, n)),
        "decode": ("lengths", lambda n: cache.decode(q, k, v, n)),
        "prefill": ("lengths", lambda n: cache.prefill(k, v, n)),
        "attend": ("lengths", lambda n: cache.attend(q[:, :1], lengths=n)),
        "truncate": ("lengths", cache.truncate),
        "reorder_": ("beams", cache.reorder_),
        "select": ("index", cache.select),
    }
    numbers = torch.tensor([1, 0, 1])
    for method, (name, call) in calls.items():
        with pytest.raises(TypeError, match=f"{method}: {name} must be a dense tensor, got layout"):
            call(numbers.to_sparse())
        with pytest.raises(DeviceError, match=f"{method}: {name} must be on a device that holds .* got meta"):
            call(numbers.to("meta"))
    assert_same_content(cache, before)
    assert cache.compressed_lengths == before.compressed_lengths


def test_attention_refuses_a_backward(device):
    cache = make(device)
    cache.append(*tokens(device, 30))
    q = normal((BATCH, 8, WIDTH), torch.float16, device, seed=15).requires_grad_()
    out, _ = cache.attend(q)
    assert out.requires_grad
    with pytest.raises(RuntimeError, match="kv_decode_attention"):
        out.sum().backward()
    with torch.no_grad():
        assert not cache.attend(q)[0].requires_grad


@pytest.mark.parametrize("kind", ["plain", "paged"])
def test_a_cache_of_no_sequence(kind, device):
    none = make(device, batch=0, **KINDS[kind])
    none.reorder_([])
    assert none.host_lengths() == []


def test_a_full_cache_says_so_and_stays_as_it_was(device):
    k, v = tokens(device, 131)
    cache = make(device)
    with pytest.raises(
        ValueError, match=r"prefill: sequence 0 holds 0 tokens; 131 more exceed the capacity of 130"
    ):
        cache.prefill(k, v)
    cache.prefill(k[:, :120], v[:, :120], [3, 120, 7])
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=r"append: sequence 1 holds 120 tokens; 11 more exceed the capacity"):
        cache.append(k[:, :11], v[:, :11])
    assert_same_content(cache, before)
    cache.append(k[:, :10], v[:, :10])
    with pytest.raises(ValueError, match=r"advance: sequence 1 holds 130 tokens; 1 more"):
        cache.advance()
    with pytest.raises(RuntimeError, match="the cache holds tokens already"):
        cache.prefill(k[:, :1], v[:, :1])


@pytest.mark.parametrize("capacity", [1, 5, 20, 21, 22])
def test_small_capacities(capacity, device):
    k, v = tokens(device, capacity)
    q = normal((BATCH, 8, WIDTH), torch.float16, device, seed=13)
    cache = make(device, capacity=capacity)
    assert not cache.attend(q)[0].any()
    for t in range(capacity):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
    with pytest.raises(ValueError, match="capacity"):
        cache.append(k[:, :1], v[:, :1])
    cache.settle()
    assert cache.compressed_lengths == [compressed_length(capacity)] * BATCH
    assert cache.attend(q)[0].isfinite().all()


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "keep": ({"keep": 65}, ValueError, r"k_keep must be between 1 and 64, got 65"),
    "value keep": ({"keep": (64, 0)}, ValueError, r"v_keep must be between 1 and 64, got 0"),
    "bits": ({"bits": 2}, ValueError, r"k_bits must be one of 16, 8, 4, got 2"),
    "float bits": ({"bits": 8.0}, TypeError, r"k_bits must be an int, got float"),
    "three keeps": ({"keep": (1, 2, 3)}, TypeError, r"k_keep must be an int, got tuple"),
    "window": ({"window": -1}, ValueError, r"window must be between 0"),
    "chunk": ({"chunk": 0}, ValueError, r"chunk must be between 1"),
    "capacity": ({"capacity": 0}, ValueError, r"capacity must be between 1"),
    "page": ({"page_size": 5}, ValueError, r"page_size must divide chunk = 16, got 5"),
    "page 0": ({"page_size": 0}, ValueError, r"page_size must be between 1"),
    "pages": ({"num_pages": 5}, ValueError, r"num_pages must be None where page_size is None, got 5"),
    "group": ({"hadamard_group": 3}, ValueError, r"hadamard_group must divide H_kv = 4, got 3"),
    "split": ({"split_size": -1}, ValueError, r"split_size"),
    "dtype": ({"dtype": torch.float64}, UnsupportedDtypeError, r"dtype must be"),
    "device": ({"device": "ab"}, DeviceError, r'device must be a device of torch, such as "cpu" .*, got \'ab\''),
    "number of a device": ({"device": 2.5}, TypeError, r"device must be a torch\.device, a str or an int, got float"),
    "dtype of 16": ({"bits": (8, 16), "dtype": torch.float32}, UnsupportedDtypeError, r"float16 or torch\.bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options(name):
    changes, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        make(**{"device": "cpu"} | changes)


def test_wrong_tokens_and_indices():
    def nested(x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor(list(x))

    cache = make("cpu")
    k, v = tokens("cpu", 4)
    with pytest.raises(
        ShapeMismatchError, match="head_dim must be a multiple of 64 between 64 and 512, got 80"
    ):
        CompressedKVCache(1, 1, 80, 10, 40)
    for call, kind, message in (
        (lambda: cache.append(k[:2], v[:2]), ShapeMismatchError, r"append: k must be \[3, S, 4, 64\], got"),
        (lambda: cache.append(k, v[:, :3]), ShapeMismatchError, r"size 1 of v must be S of k = 4"),
        (lambda: cache.append(k[..., :32], v[..., :32]), ShapeMismatchError, r"k must be \[3, S, 4, 64\]"),
        (lambda: cache.append(k[0], v[0]), ShapeMismatchError, r"k must be 4-D"),
        (lambda: cache.append(k.float(), v.float()), UnsupportedDtypeError, r"k must have dtype torch\.float16"),
        (lambda: cache.append(k[:, :, :3], v), ShapeMismatchError, r"append: k must be \[3, S, 4, 64\], got \(3, 4, 3"),
        (lambda: cache.append(k, v.to("meta")), DeviceError, r"v must be on the device of k"),
        (lambda: cache.append(k.to("meta"), v), DeviceError, r"append: k must be on the device of the cache"),
        (lambda: cache.append(k.to("meta"), v.to("meta")), DeviceError, r"the device of the cache \(cpu\)"),
        (lambda: cache.append(None, v), TypeError, r"k must be a Tensor, got NoneType"),
        (lambda: cache.prefill(k, v, [1, 2]), ValueError, r"lengths must be 3 numbers between 0 and 4, got \[1, 2\]"),
        (lambda: cache.prefill(k, v, [1, 2, 5]), ValueError, r"lengths must be 3 numbers between 0 and 4"),
        (lambda: cache.reorder_([0, 1]), ValueError, r"beams must be 3 numbers between 0 and 2, got \[0, 1\]"),
        (lambda: cache.reorder_([0, 1, 3]), ValueError, r"beams must be 3 numbers between 0 and 2, got"),
        (lambda: cache.select([-1]), ValueError, r"select: index must be numbers between 0 and 2, got \[-1\]"),
        (lambda: cache.reorder_([0.9, 1.5, 0]), TypeError, r"reorder_: beams must be a list of ints"),
        (lambda: cache.reorder_({0, 1, 2}), TypeError, r"reorder_: beams must be a list of ints or a Tensor, got set"),
        (lambda: cache.reorder_(torch.zeros(3)), TypeError, r"reorder_: beams must have dtype .* got torch\.float32"),
        (lambda: cache.reorder_(torch.zeros(3).byte()), TypeError, r"reorder_: beams must have dtype .* torch\.uint8"),
        (lambda: cache.reorder_([True, False, True]), TypeError, r"reorder_: beams must be a list of ints"),
        (lambda: cache.reorder_(torch.zeros(3, 1).int()), ValueError, r"reorder_: beams must be 1-D, got 2-D \(3, 1\)"),
        (lambda: cache.select(None), TypeError, r"select: index must be a list of ints or a Tensor, got NoneType"),
        (lambda: cache.prefill(k, v, [1.5, 2, 3]), TypeError, r"prefill: lengths must be a list of ints"),
        (lambda: cache.attend(k[:, 0].float()), UnsupportedDtypeError, r"attend: q must have dtype"),
        (lambda: cache.attend(k[:2, 0]), ShapeMismatchError, r"q must be \[3, H, 64\] or .*, got \(2, 4, 64\)"),
        (lambda: cache.attend(k[:, 0, :3]), ShapeMismatchError, r"a positive multiple of H_kv = 4, got 3"),
        (lambda: cache.attend(k[:, :, :0]), ShapeMismatchError, r"a positive multiple of H_kv = 4, got 0"),
        (lambda: cache.attend(k[:, 0].to("meta")), DeviceError, r"q must be on the device of the cache"),
        (lambda: cache.to("meta").to("cpu"), DeviceError, r"\.to: cache must be on a device that holds .* got meta"),
        (lambda: cache.to("ab"), DeviceError, r"CompressedKVCache\.to: device must be a device of .*, got 'ab'"),
        (lambda: cache.to(device=3.5), TypeError, r"\.to: device must be a torch\.device, a str or .*, got float"),
        (lambda: cache.to(3.5), TypeError, r"\.to: takes a device and a dtype, got float"),
        (lambda: cache.to(torch.half, torch.bfloat16), TypeError, r"takes a device and a dtype, got a second dtype"),
        (lambda: cache.to("cpu", device="cpu"), TypeError, r"\.to: takes a device and a dtype, got a second str"),
        (lambda: cache.to("meta").select([0]), DeviceError, r"select: cache must be on a device .* got meta"),
        (lambda: cache.truncate(2.0), TypeError, r"lengths must be an int, a list of ints or a Tensor, got float"),
        (lambda: cache.append(nested(k), v), TypeError, r"append: k must be a dense tensor, got a nested one"),
        (lambda: cache.decode(k, k, nested(v)), TypeError, r"decode: v must be a dense tensor, got a nested one"),
        (lambda: cache.attend(k[:, 0], "a"), TypeError, r"scale must be a number, got str"),
        (lambda: cache.attend(k[:, 0], 1e300), ValueError, r"scale must be finite"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            call()
    assert cache.host_lengths() == [0, 0, 0]
