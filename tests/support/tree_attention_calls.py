"""One call of every op of tree attention, from one case: for opcheck, compile and fuzz tests."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from htree_ops.ops.tree_attention.options import DEFAULTS
from htree_ops.reference import tree_attention as reference
from tests.support.cases import normal
from tests.support.opcheck import opcheck
from tests.support.tree_attention_cases import TreeAttentionCase


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a result or of arguments."""
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def facts(result: Any) -> list[tuple[Any, ...]]:
    """What Meta promises of a result."""
    return [(tuple(x.shape), x.stride(), x.dtype) for x in tensors_of(result)]


def to_meta(value: Any) -> Any:
    """Arguments on the device meta, with the same sizes and strides."""

    def moved(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return torch.device("meta") if isinstance(x, torch.device) else x

    return tree_map(moved, value)


@dataclass(frozen=True)
class Call:
    """Arguments of ``torch.ops.htree.<op>``; ``differentiable`` are the positions that may require grad."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    differentiable: tuple[int, ...] = ()

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The op itself."""
        return getattr(torch.ops.htree, self.op).default

    def __call__(self) -> Any:
        """Result of the op."""
        return self.overload(*self.args, **self.kwargs)

    def assert_meta_agrees(self) -> None:
        """Shape, stride and dtype of every output are those that Meta gives."""
        meta = self.overload(*to_meta(self.args), **to_meta(self.kwargs))
        assert facts(meta) == facts(self()), self.op

    def opcheck(self) -> None:
        """``torch.library.opcheck`` of the call, and where it has a gradient, of the call that records one."""
        detached = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in self.args)
        opcheck(self.overload, detached, self.kwargs)
        if self.differentiable:
            places = enumerate(detached)
            leaves = tuple(x.requires_grad_() if i in self.differentiable else x for i, x in places)
            opcheck(self.overload, leaves, self.kwargs)


def calls(case: TreeAttentionCase, device: str | torch.device, seed: int = 0) -> list[Call]:
    """A valid call of every op, one per op, made from the case's inputs and the reference's lists.

    The ops of a layer get the top layer of the tree; those above the bottom only where there is one. The ops that
    have no ``selection_stride`` get the lists of a stride of 1.
    """
    q, k, v = case.make_qkv(device, seed)
    cos, sin = case.make_table(device)
    stages = case.make_stages(q, k, v)
    top, bottom = stages[-1], stages[0]
    repeats = case.selection_stride
    lists = top.parents.repeat_interleave(repeats, 1)[:, : case.T_q].contiguous()
    rate, top_k, t0 = case.r, case.top_k, case.t0
    scores, count = reference.compute_scores(q, top.layer_k, lists, cos, sin, top.layer, rate, case.scale, t0)
    scores = scores.to(case.state_dtype)
    positions = reference.select_topk(scores, count, top_k, case.importance, case.open_next)
    rows = (case.B, case.T_q, case.H)
    state = [
        normal((*rows, *w), case.state_dtype, device, seed + i) for i, w in enumerate(((), (), (case.V,)))
    ]
    state[1] = state[1].abs() + 1
    other = [x.clone() for x in state]
    per_head = lists.repeat_interleave(case.H // case.H_kv, 2)
    node = per_head[..., : min(2, case.top_k)].contiguous()
    shared = (rate, case.M, top_k, case.scale, case.rope_base, case.importance, case.selection_stride)
    layer = (q, top.layer_k, top.layer_v, top.parents, cos, sin)
    step = (case.scale, case.importance, t0, case.selection_stride)
    span: dict[str, Any] = {} if case.selection_span is None else {"selection_span": case.selection_span}
    following: dict[str, Any] = {"open_next": True} if case.open_next else {}
    given: dict[str, Any] = {} if case.inv_freq is None else {"inv_freq": list(case.inv_freq)}
    named = list(case.keywords().items())[len(shared) :]
    later = {name: value for name, value in named if value != getattr(DEFAULTS, name)}
    packed, mask = case.packed(), [True] * 3
    means = reference.span_means(k, case.selection_span or 2)
    layer_span = (span and {"span_k": means, **span}) | following
    forward = torch.ops.htree.attention_forward(q, k, v, *shared, **later)
    parents = [stage.parents for stage in stages]
    stored = torch.ops.htree._attention_rows(q, k, v, [t0], True, *packed)[3]
    dout = normal((*rows, case.V), case.dtype, device, seed + 9)
    dlse = normal(rows, case.state_dtype, device, seed + 10)
    io_shared = (rate, case.M, top_k, case.scale, "stratified", True)
    built = reference.tree_build(k, v, rate)
    times = torch.arange(case.T_q, device=device, dtype=torch.int32) % (rate * top_k)
    found = [
        Call("tree_build", (k, v, rate), differentiable=(0, 1)),
        Call("tree_build_backward", (*built, case.T, rate)),
        Call("span_means", (k, case.selection_span or 2)),
        Call("rope_cache", (rate * top_k, case.K), {"device": torch.device(device), **given}),
        Call("rope", (q, cos, sin, times), differentiable=(0,)),
        Call(
            "top_parents",
            (case.B, case.T_q, case.H_kv, top_k, len(stages), rate, t0, case.selection_stride),
            {"device": torch.device(device)},
        ),
        Call("compute_scores", (q, top.layer_k, lists, cos, sin, top.layer, rate, case.scale, t0)),
        Call("select_topk", (scores, count, top_k, case.importance), following),
        Call("mask_topk_scores_", (scores.clone(), positions)),
        Call("compute_next_parents", (lists, positions, rate)),
        Call("accumulate_non_topk", (top.layer_v, lists, scores, count, top.layer, rate, t0)),
        Call(
            "compute_and_select",
            (q, top.layer_k, top.layer_v, per_head, cos, sin, top.layer, rate, top_k, case.scale, t0),
        ),
        Call("subtract_topk", (top.layer_v, node, node.to(case.state_dtype), *state)),
        Call(
            "bottom_accumulate",
            (q, k, v, bottom.parents, cos, sin, rate, case.scale, t0, case.selection_stride),
        ),
        Call("merge_to_global_", (*state, *other)),
        Call("final_normalize", (state[2], state[1], case.dtype)),
        Call("io_compute_scores", (q, top.layer_k, lists, cos, sin, top.layer, rate, case.scale, t0)),
        Call("io_select_topk", (scores, count, top_k, top.layer, "lcg", t0)),
        Call("io_accumulate_non_topk", (top.layer_v, lists, scores, count, top.layer, rate, t0)),
        Call("io_compute_next_parents", (lists, positions, rate)),
        Call("io_attention_forward", (q, k, v, *io_shared)),
        Call("attention_forward", (q, k, v, *shared), later),
        *(
            Call(name, (q, k, v, *shared), later, differentiable=(0, 1, 2))
            for name in ("attention", "tree_attention")
        ),
        Call("attention_backward", (dout, q, k, v, *forward[:3], parents, *shared), later),
        Call("_attention_forward", (q, k, v, True, *packed)),
        Call("_attention", (q, k, v, True, *packed), differentiable=(0, 1, 2)),
        Call("_attention_lse", (q, k, v, True, *packed), differentiable=(0, 1, 2)),
        Call("_attention_rows", (q, k, v, [t0], True, *packed)),
        Call("_attention_backward", (dout, q, k, v, *forward[:3], parents, mask, *packed)),
        *(
            Call(name, (q, k, v, *forward[:3], stored, *given, [t0], mask, *packed))
            for name, given in (
                ("_attention_rows_backward", (dout, dlse)),
                ("_attention_rows_backward", (None, dlse)),
                ("_attention_rows_backward_sums", (dout, None)),
            )
        ),
    ]
    if top.layer > 0:
        found += [
            Call("select_accumulate", (*layer, top.layer, rate, top_k, *step), layer_span),
            Call(
                "recompute_selection",
                (q, top.layer_k, top.parents, cos, sin, top.layer, rate, top_k, *step),
                layer_span,
            ),
        ]
    return found


def calls_with(case: TreeAttentionCase, device: str | torch.device, option: str) -> list[Call]:
    """The calls that are given the option, by its name or among the packed ones."""
    return [call for call in calls(case, device) if option in call.kwargs or call.op.startswith("_")]


#: The layer is layer 1 with 5 nodes.
NAMED_CASE = TreeAttentionCase(
    name="named", dtype=torch.float32, B=2, T=20, num_queries=12, H=4, H_kv=2, K=6, V=5, r=4, top_k=2, M=8
)


@cache
def named_calls(device: str) -> dict[str, dict[str, Any]]:
    """The arguments of every op by their names for :data:`NAMED_CASE`, those with their defaults among them."""
    found: dict[str, dict[str, Any]] = {}
    for call in calls(NAMED_CASE, device):
        declared = call.overload._schema.arguments
        given = {x.name: x.default_value for x in declared}
        given |= dict(zip((x.name for x in declared), call.args, strict=False)) | call.kwargs
        found.setdefault(call.op, given)
    return found


def stage_arguments(stage: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of the op of that name, as far as the function of a stage has them by their Python types."""
    accepted = inspect.signature(stage).parameters.keys() - {"device", "dtype"}
    return {name: x for name, x in named_calls("cpu")[stage.__name__].items() if name in accepted}
