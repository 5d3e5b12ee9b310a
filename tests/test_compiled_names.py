"""Every name of the tables of README.md and docs/ops.md under torch.compile(fullgraph=True) and torch.export.

A compiled call does what the eager one does: the same results, the same gradients, the same refusals; and where a
backward has no formula, it is the backward that raises. Modules and caches are called as a model calls them.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

import htree_ops
from htree_ops import CompressedKVCache, HTreeAttention, MustafarAttention, TreeKVCache
from tests.support.cases import normal
from tests.support.module_makers import NAMED
from tests.support.row_calls import row_calls
from tests.support.tree_attention_calls import calls
from tests.support.tree_attention_cases import SHAPES
from tests.test_compiled_errors import CALLS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
OPS_PAGE = (ROOT / "docs" / "ops.md").read_text()
TREE: dict[str, Any] = {"compression_rate": 4, "top_k": 4, "max_top_nodes": 16}


@dataclass
class Subject:
    """A call on a device: of a function of tensors, or of a module, with the tensors."""

    function: Callable[..., Any]
    tensors: list[Tensor]

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.function.parameters()) if isinstance(self.function, nn.Module) else []


Make = Callable[[str], Subject]


# ---- functions and ops


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """An argument whose tensors are the next ones of ``tensors``."""
    if isinstance(value, list):
        return [with_tensors(x, tensors) for x in value]
    return next(tensors) if isinstance(value, Tensor) else value


def of_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
    def call(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        mine = [with_tensors(x, rest) for x in args]
        return function(*mine, **{name: with_tensors(x, rest) for name, x in kwargs.items()})

    return Subject(call, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)])


def of_function(function: Callable[..., Any], kwargs: dict[str, Any]) -> Make:
    def make(device: str) -> Subject:
        mine = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in kwargs.items()}
        # The table has zeros there, which a call refuses.
        scales = {name: torch.ones_like(x) for name, x in mine.items() if re.fullmatch("([ab]_)?scale", name)}
        return of_call(function, (), mine | scales)

    return make


def of_op(name: str, case: int) -> Make:
    def make(device: str) -> Subject:
        call = op_calls(device)[name][case]
        return of_call(call.overload, call.args, call.kwargs)

    return make


def op_calls(device: str) -> dict[str, list[Any]]:
    """Calls of every op, by its name."""
    found: dict[str, list[Any]] = {}
    case = next(case for case in SHAPES if case.name == "stride4_suffix")
    plain = next(case for case in SHAPES if case.name == "ragged_everywhere")
    for call in (*calls(case, device), *calls(plain, device), *row_calls(device)):
        found.setdefault(call.op, []).append(call)
    return found


#: It returns a number, which Dynamo takes from no op.
NUMBER = "_tree_cache_prompt_bytes"
OPS = {name: found for name, found in op_calls("cpu").items() if name != NUMBER}


# ---- modules and caches


class Called(nn.Module):
    """A module under the call that a model makes of it."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(self.module, *tensors)


def of_module(
    make: Callable[[str], nn.Module], *shapes: tuple[int, ...], call: Callable[..., Any] | None = None
) -> Make:
    def made(device: str) -> Subject:
        torch.manual_seed(0)
        module = make(device)
        tensors = [normal(shape, torch.float32, device, seed) for seed, shape in enumerate(shapes)]
        return Subject(module if call is None else Called(module, call), tensors)

    return made


def attention(device: str) -> HTreeAttention:
    return HTreeAttention(32, 4, 2, selection_stride=2, **TREE, device=device)


def padded(layer: nn.Module, x: Tensor) -> Tensor:
    mask = torch.arange(20, device=x.device) >= torch.tensor([20, 15], device=x.device)[:, None]
    return layer(x, key_padding_mask=mask)


def packed(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x[:1], cu_seqlens=torch.tensor([0, 7, 20], dtype=torch.int32, device=x.device))


def with_cache(device: str) -> Subject:
    torch.manual_seed(0)
    layer = attention(device)
    cache = layer.make_cache(2, 30)
    with torch.no_grad():
        layer(normal((2, 9, 32), torch.float32, device, 3), cache=cache)
    x = normal((2, 3, 32), torch.float32, device, 4)
    return Subject(Called(layer, lambda m, x: (m(x, cache=cache), cache.lengths.clone())), [x])


def tree_cache(**options: Any) -> Make:
    def make(device: str) -> Subject:
        cache = TreeKVCache(2, 2, 64, 64, **TREE, page_size=8, dtype=torch.float32, device=device, **options)
        cache.append(*(normal((2, 20, 2, 64), torch.float32, device, seed) for seed in (0, 1)))
        cache.attend(normal((2, 20, 4, 64), torch.float32, device, 2))
        tensors = [normal((2, 3, heads, 64), torch.float32, device, 3 + heads) for heads in (4, 2, 2)]

        def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
            cache.append(k, v)
            out = cache.attend(q, return_lse=True)
            cache.truncate(22)
            again = cache.decode(q[:, :1], k[:, :1], v[:, :1])
            return (*out, again), [
                x.clone() for x in (cache.lengths, cache.block_table, cache.ring.lists, cache.ring.list_pos)
            ]

        return Subject(step, tensors)

    return make


def compressed_cache(device: str) -> CompressedKVCache:
    cache = CompressedKVCache(2, 2, 64, 64, 20, 8, 4, 8, dtype=torch.float32, device=device)
    cache.prefill(*(normal((2, 21, 2, 64), torch.float32, device, seed) for seed in (0, 1)))
    return cache


def compressed_step(device: str) -> Subject:
    cache = compressed_cache(device)
    tensors = [normal((2, 1, heads, 64), torch.float32, device, 3 + heads) for heads in (4, 2, 2)]

    def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
        cache.write_token(k, v)
        return cache.attend(q), cache.win_len.clone()

    return Subject(step, tensors)


def linears(device: str) -> nn.Module:
    return htree_ops.quantize_model_(
        nn.Sequential(nn.Linear(32, 16, device=device), nn.GELU(), nn.Linear(16, 8, device=device))
    )


def mustafar(device: str) -> MustafarAttention:
    return MustafarAttention(
        4, 2, 64, sparsity=44 / 64, window=4, chunk=8, max_positions=64, dtype=torch.float32, device=device
    )


HEADS = ((2, 20, 4, 64), (2, 20, 2, 64), (2, 20, 2, 64))
SUBJECTS: dict[str, Make] = {
    **{f"op {name}": of_op(name, 0) for name in OPS},
    **{f"op {name}, other": of_op(name, 1) for name, found in OPS.items() if len(found) > 1},
    **{
        function.__name__: of_function(function, kwargs)
        for function, kwargs, _ in CALLS
        if function.__name__ in htree_ops.__all__
    },
    "HTreeAttention": of_module(attention, (2, 20, 32)),
    "HTreeAttention, padded": of_module(attention, (2, 20, 32), call=padded),
    "HTreeAttention, packed": of_module(attention, (2, 20, 32), call=packed),
    "HTreeAttention, with a cache": with_cache,
    "TreeKVCache": tree_cache(selection_stride=2),
    "TreeKVCache, spans": tree_cache(selection_span=2),
    "TreeKVCache, packed": tree_cache(leaf_bits=8),
    "FusedRMSNormRoPE": of_module(NAMED["FusedRMSNormRoPE"], (2, 3, 16), (3, 4), (3, 4)),
    "FusedGatedMLP": of_module(NAMED["FusedGatedMLP"], (2, 3, 16)),
    "FP8Linear": of_module(NAMED["FP8Linear dynamic"], (3, 32)),
    "FP8Linear, static": of_module(NAMED["FP8Linear static"], (3, 32)),
    "quantize_model_": of_module(linears, (3, 32)),  # the model that it has changed
    "HadamardTransform": of_module(NAMED["HadamardTransform"], (3, 16)),
    "CompressedKVCache": compressed_step,
    "MustafarAttention": of_module(mustafar, *HEADS),
    "MustafarAttention, lengths": of_module(mustafar, *HEADS, call=lambda m, *x: m(*x, lengths=[20, 7])),
}


# ---- what a call does


def sentence(error: Exception) -> str:
    """What a refusal says behind the name of its function, for which a graph may have that of the op."""
    return str(error).splitlines()[0].partition(": ")[2]


def copies(subject: Subject, records: bool) -> list[Tensor]:
    """The tensors of a call; where it ``records``, all of them that can require a gradient."""
    return [
        x.clone().requires_grad_(records and x.is_floating_point() and x.itemsize > 1)
        for x in subject.tensors
    ]


def outcome(subject: Subject, function: Callable[..., Any], records: bool) -> dict[str, Any]:
    """Results, what was written, gradients or the sentence of a backward that raised."""
    mine = copies(subject, records)
    with torch.set_grad_enabled(records):
        out = function(*mine)
    results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    found: dict[str, Any] = {
        "values": [x for x in tree_leaves(out) if not isinstance(x, Tensor)],
        "results": [x.detach() for x in results],
        "written": [x.detach() for x in mine],
        "records": [x.requires_grad for x in results],
    }
    ends = [x for x in results if x.requires_grad]
    if ends:
        wanted = [x for x in (*mine, *subject.parameters) if x.requires_grad]
        total = torch.stack([x.double().nan_to_num().sum() for x in ends]).sum()
        try:
            found["gradients"] = torch.autograd.grad(total, wanted, allow_unused=True)
        except RuntimeError as error:
            found["raises"] = sentence(error)
    return found


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for name, theirs in wanted.items():
        if name in ("values", "records", "raises"):
            assert got[name] == theirs
            continue
        for x, y in zip(got[name], theirs, strict=True):
            if x is None or y is None:  # a gradient that is not there may be zeros for a compiler
                assert all(z is None or not z.any() for z in (x, y)), name
                continue
            floats = x.dtype.is_floating_point
            x, y = (z.float() if floats and z.itemsize == 1 else z for z in (x, y))
            torch.testing.assert_close(x, y, equal_nan=True)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def eager(name: str, records: bool, device: str) -> dict[str, Any] | NotImplementedError:
    subject = SUBJECTS[name](device)
    try:
        return outcome(subject, subject.function, records)
    except NotImplementedError as error:
        return error


def compiled(subject: Subject, records: bool) -> dict[str, Any]:
    function = torch.compile(subject.function, fullgraph=True, backend="aot_eager")
    return outcome(subject, function, records)


def exported(subject: Subject, records: bool) -> dict[str, Any]:
    with torch.set_grad_enabled(records):
        module = Called(nn.Identity(), lambda _, *x: subject.function(*x))
        if isinstance(subject.function, nn.Module):
            module = subject.function
        program = torch.export.export(module, tuple(copies(subject, records)))
    return outcome(subject, program.module(), records)


@pytest.mark.parametrize("records", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("way", [compiled, exported])
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_graph_does_what_the_eager_call_does(name, way, records, device):
    wanted = eager(name, records, device)
    if isinstance(wanted, NotImplementedError):
        with pytest.raises(Exception, match=re.escape(sentence(wanted))):
            way(SUBJECTS[name](device), records)
    else:
        assert_same(way(SUBJECTS[name](device), records), wanted)


def test_every_name_of_the_tables_has_a_subject():
    table = README.partition("\n## Names\n")[2].partition("\n## ")[0]
    names = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    assert len(names) >= 10
    rows = re.findall(r"^\|(.*?)\|", OPS_PAGE, re.M)
    names |= set(re.findall(r"`(\w+)`", "".join(rows)))
    # _refuse_backward raises, whoever calls it; index_losses and fit_index run whole models (tests/index_loss); the op
    # of tree_cache_append_packed_ is _tree_cache_append_ with leaves
    names -= {
        NUMBER,
        "_refuse_backward",
        "TreeOptions",
        "index_losses",
        "fit_index",
        "tree_cache_append_packed_",
    }
    known = {re.sub("^op |, .*$", "", name) for name in SUBJECTS}
    known |= {name.removeprefix("_") for name in known}  # functions that only pack options for a private op
    assert names - known == set()


def test_an_op_that_returns_a_number_is_refused_in_a_graph(device):
    subject = of_op(NUMBER, 0)(device)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"op returned non-Tensor(?s:.)*{NUMBER}"):
        compiled(subject, records=False)


# ---- what counts tokens on the host


COUNTING: dict[str, Callable[[CompressedKVCache, list[Tensor]], Any]] = {
    "advance": lambda c, x: c.advance(),
    "append": lambda c, x: c.append(*x[1:]),
    "decode": lambda c, x: c.decode(*x),
    "load_state_dict": lambda c, x: c.load_state_dict({}),
    "prefill": lambda c, x: c.prefill(*x[1:]),
    "reorder_": lambda c, x: c.reorder_([1, 0]),
    "select": lambda c, x: c.select([1]),
    "settle": lambda c, x: c.settle(),
    "truncate": lambda c, x: c.truncate(3),
}


@pytest.mark.parametrize("strict", [None, False, True], ids=["compile", "export", "strict export"])
@pytest.mark.parametrize("method", [*COUNTING, "MustafarAttention"])
def test_counts_on_the_host_are_refused_in_a_graph(method, strict):
    """They would hold for the traced counts alone. The cache is left as it was."""
    cache, layer = compressed_cache("cpu"), mustafar("cpu")
    tensors = [normal((2, 1, heads, 64), torch.float32, "cpu", heads) for heads in (4, 2, 2)]
    before = cache.state_dict()

    class Step(nn.Module):
        def forward(self, *x):
            if method == "MustafarAttention":
                return layer(*x, cache=cache)
            COUNTING[method](cache, list(x))
            return x[0]

    name = "decode" if method == "MustafarAttention" else method
    message = rf"CompressedKVCache\.{name}: cannot be compiled or exported, .* compile write_token and attend"

    def trace():
        if strict is None:
            torch.compile(Step(), fullgraph=True, backend="aot_eager")(*tensors)
        else:
            torch.export.export(Step(), tuple(tensors), strict=strict)

    with torch.no_grad(), pytest.raises(Exception, match=message):
        trace()
    assert cache.host_lengths() == [21, 21]
    assert all(torch.equal(x, before[key]) for key, x in cache.state_dict().items())


@pytest.mark.parametrize("method", ["reorder_", "fork", "reserve"])
def test_pages_are_not_moved_in_a_graph(method):
    cache = TreeKVCache(2, 2, 64, 64, **TREE, page_size=8, num_pages=9, dtype=torch.float32)
    arguments = {"reorder_": ([1, 0],), "fork": (0, 1), "reserve": (3,)}

    def step(x):
        getattr(cache, method)(*arguments[method])
        return x + 1

    with pytest.raises(Exception, match=rf"TreeKVCache\.{method}: .*call it (between|before)"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(torch.ones(2))
    assert cache.block_table.eq(-1).all()


def test_a_compiled_step_serves_all_lengths():
    """One graph from the first token to the capacity, beside ``advance``; chunks are compressed on the way."""
    cache, other = compressed_cache("cpu"), compressed_cache("cpu")
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v):
        cache.write_token(k, v)
        return cache.attend(q)[0]

    fast = torch.compile(step, fullgraph=True, backend=counter)
    for token in range(64 - 21):
        x = [normal((2, 1, heads, 64), torch.float32, "cpu", 100 * token + heads) for heads in (4, 2, 2)]
        cache.settle()
        assert torch.equal(fast(*x), other.decode(*x)[0])
        cache.advance()
        assert cache.host_lengths() == other.host_lengths()
    assert counter.frame_count == 1


def test_a_layer_with_such_a_cache_runs_beside_graphs():
    """Without fullgraph torch.compile leaves out what the cache refuses."""
    layer = mustafar("cpu")
    cache, other = layer.make_cache(2, 60), layer.make_cache(2, 60)
    fast = torch.compile(lambda *x: layer(*x, cache=cache), backend="aot_eager")
    with torch.no_grad():
        for n in (9, 1, 1, 3, 1, 20):
            x = [normal((2, n, heads, 64), torch.float32, "cpu", n + heads) for heads in (4, 2, 2)]
            torch.testing.assert_close(fast(*x), layer(*x, cache=other))
    assert cache.host_lengths() == other.host_lengths() == [35, 35]
