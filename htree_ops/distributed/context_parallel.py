"""Tree attention over a sequence whose tokens lie on several ranks (docs/distributed.md)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import Unpack

from htree_ops.distributed.collectives import (
    added,
    agreement,
    all_gather,
    check_local,
    cut,
    exchange,
    group_of,
    join,
    kind_of,
    parts_of,
    parts_per_rank,
    waited,
    wanted_gradients,
)
from htree_ops.ops.arguments import autocast_dtype, check_tensors, validate_arguments_as
from htree_ops.ops.tree_attention.attention import (
    Balance,
    Index,
    check_balance,
    options_of_call,
    tree_attention,
)
from htree_ops.ops.tree_attention.options import TreeKeywords, TreeOptions, tree_options

#: Keys and values are gathered in up to so many steps, of at least so many bytes: less is soon there, and the results
#: of several steps have to be put together. For fewer ranks than these the exchange is a hundredth of the work.
MOST_STEPS = 4
STEP_BYTES = 32 << 20
FEWEST_RANKS = 4


def choose_steps(kv_heads: int, num_bytes: int, ranks: int) -> int:
    """The steps in which the keys and values of all ranks are gathered, a divisor of their heads.

    The attention of one step runs while the keys of the next are on their way. ``num_bytes``: of the gathered tensors.
    """
    if ranks < FEWEST_RANKS:
        return 1
    steps = [n for n in range(2, MOST_STEPS + 1) if kv_heads % n == 0 and num_bytes >= n * STEP_BYTES]
    return steps[-1] if steps else 1


class _Attention(torch.autograd.Function):
    """Attention of this rank's rows over the keys and values of all ranks, in steps of K/V heads.

    What is kept for the backward is this rank's own: keys and values are gathered there again. Lists that an index has
    chosen are kept, so that index keys are gathered once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index_query: Tensor | None,
        index_key: Tensor | None,
        group_name: GroupName,
        rank: int,
        size: int,
        balance: Balance,
        groups: int,
        steps: int,
        store_parents: bool,
        *packed: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.group_name, ctx.size, ctx.balance, ctx.groups = group_name, size, balance, groups
        ctx.steps, ctx.packed = steps, packed
        parts = parts_of(rank, size, balance, size * q.shape[1])
        ctx.starts = [part * (q.shape[1] // len(parts)) for part in parts]
        index_keys = None if index_key is None else all_gather(index_key, group_name)
        under_way = _gather(k, v, ctx)
        # The choice runs while keys and values are on their way.
        chosen = None if index_keys is None else _choose(q, k, index_query, index_keys, ctx)
        results = []
        for step, rows in enumerate(q.chunk(steps, 2)):
            keys, values = _whole(under_way.pop(0), ctx)
            if chosen is None:
                found = torch.ops.htree._attention_rows(
                    rows, keys, values, ctx.starts, store_parents, *packed
                )
            else:
                lists = chosen[step]
                states = torch.ops.htree._listed_attention_rows(
                    rows, keys, values, lists, ctx.starts, *packed
                )
                found = (*states, lists)
            results.append(found)
        out, gmax, gsum = (_together([result[i] for result in results]) for i in range(3))
        ctx.save_for_backward(q, k, v, out, gmax, gsum, *(result[3] for result in results))
        return out, gmax + gsum.log()

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = [None] * (9 + len(ctx.packed))
        if dout is None and dlse is None:
            return None, None, None, *nothing
        q, k, v, out, gmax, gsum, *lists = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        under_way = _gather(k, v, ctx)
        dq: list[Tensor] = []
        dk: list[Tensor] = []
        dv: list[Tensor] = []
        of_heads = ([None] * ctx.steps if x is None else x.chunk(ctx.steps, 2) for x in (dout, dlse))
        by_step = zip(*of_heads, *(x.chunk(ctx.steps, 2) for x in (q, out, gmax, gsum)), strict=True)
        for (d, d_lse, rows, *states), stored in zip(by_step, lists, strict=True):
            keys, values = _whole(under_way.pop(0), ctx)
            gradients = torch.ops.htree._attention_rows_backward_sums(
                rows, keys, values, *states, stored, d, d_lse, ctx.starts, mask, *ctx.packed
            )
            dq.append(gradients[0])
            # The exchange of this step runs while the next one computes.
            if mask[1]:
                dk.append(_send(gradients[1], ctx))
            if mask[2]:
                dv.append(_send(gradients[2], ctx))
        return (
            _together(dq) if mask[0] else None,
            _together([added(x, 1).to(k.dtype) for x in dk]) if mask[1] else None,
            _together([added(x, 1).to(v.dtype) for x in dv]) if mask[2] else None,
            *nothing,
        )


def _together(steps: list[Tensor]) -> Tensor:
    """The heads of all steps."""
    return torch.cat(steps, 2) if len(steps) > 1 else steps[0]


def _gather(k: Tensor, v: Tensor, ctx: Any) -> list[list[Tensor]]:
    """Of every step the keys and values of all ranks [n, B, T/n, heads, D]; all are under way when this returns."""
    steps = zip(k.chunk(ctx.steps, 2), v.chunk(ctx.steps, 2), strict=True)
    return [[all_gather(x, ctx.group_name) for x in pair] for pair in steps]


def _choose(q: Tensor, k: Tensor, index_query: Tensor | None, index_keys: Tensor, ctx: Any) -> list[Tensor]:
    """The lists of every step that an index chooses for this rank's rows, among the tokens of all ranks."""
    whole = join(waited(index_keys), 1, ctx.balance)
    sizes = k.new_empty(1).expand(k.shape[0], whole.shape[1], *k.shape[2:])  # no key is read
    lists = torch.ops.htree._index_lists(q, sizes, index_query, whole, ctx.starts, *ctx.packed)
    return [x.contiguous() for x in lists.chunk(ctx.steps, 2)]


def _whole(gathered: list[Tensor], ctx: Any) -> list[Tensor]:
    """A step's keys and values in the order of the sequence [B, T, heads * groups, D], when they are there."""
    return [repeated(join(waited(x), 1, ctx.balance), ctx.groups) for x in gathered]


def _send(gradient: Tensor, ctx: Any) -> Tensor:
    """Sends every rank what this rank's rows give for the rank's keys or values, as it was summed."""
    return exchange(cut(of_groups(gradient, ctx.groups), ctx.size, 1, ctx.balance), ctx.group_name)


@validate_arguments_as("tree_attention_cp")
def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Index | None,
    size: int,
    balance: Balance,
    options: TreeOptions,
    gather_steps: int | None,
) -> None:
    """Raises what this rank alone can see, before it waits for another."""
    name = "tree_attention_cp"
    check_balance(name, balance)
    of_index = {} if index is None else dict(zip(("index_query", "index_key"), index, strict=True))
    check_local(name, q=q, k=k, v=v, **of_index)
    check_tensors(
        name,
        q=(q, "B T H K"),
        k=(k, "B T H_kv K"),
        v=(v, "B T H_kv V"),
        **{word: (x, "B T H_i d") for word, x in of_index.items()},
    )
    tokens = q.shape[1] * size
    per_rank = parts_per_rank(balance)
    step = per_rank * size * options.compression_rate
    if tokens % step:
        pieces = "n * r" if per_rank == 1 else f"{per_rank} * n * r"
        raise ValueError(
            f"{name}: the tokens of all ranks must be a multiple of {pieces} = {step}, got {size} * "
            f"{q.shape[1]} = {tokens}; the next length that works is {(tokens // step + 1) * step}"
        )
    if gather_steps is not None and (gather_steps < 1 or k.shape[2] % gather_steps):
        raise ValueError(f"{name}: gather_steps must be a divisor of H_kv = {k.shape[2]}, got {gather_steps}")
    if not torch.compiler.is_compiling():  # else the op refuses the rest where it is traced
        with _disable_current_modes():  # a trace, a profile of calls or a count holds what computes
            rows, keys, values = _sizes(q, q.shape[1]), _sizes(k, tokens), _sizes(v, tokens)
            torch.ops.htree._attention_rows(rows, keys, values, [0], False, *options.packed())
            if index is not None:
                of_rows, of_keys = _sizes(index[0], q.shape[1]), _sizes(index[1], tokens)
                torch.ops.htree._index_lists(rows, keys, of_rows, of_keys, [0], *options.packed())


def _sizes(x: Tensor, tokens: int) -> Tensor:
    """A tensor without numbers that is as x [B, T, heads, D] with so many tokens."""
    return x.new_empty((x.shape[0], tokens, *x.shape[2:]), device="meta")


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast makes of the arguments of an attention: its dtype, but float64 stays."""
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        return q, k, v  # refused later, when every rank can be told
    dtype = autocast_dtype(q.device)
    if dtype is None:
        return q, k, v
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def kind_of_index(index: Index | None) -> dict[str, object]:
    """As options for :func:`agreement`."""
    return {"(H_i, d, dtype) of index": None if index is None else (*index[1].shape[-2:], index[1].dtype)}


def facts_of(lead: tuple[str, ...], **tensors: Tensor) -> dict[str, int]:
    """What the ranks must have in common of queries, keys and values, beside dtype, device and options.

    Args:
        lead: names of the dimensions before the heads.
    """
    q, k, v = tensors.values()
    facts = dict(zip((*lead, "H", "K"), q.shape, strict=True)) | {"H_kv": k.shape[-2], "V": v.shape[-1]}
    return facts | wanted_gradients(**tensors)


def repeated(x: Tensor, groups: int) -> Tensor:
    """Keys or values [..., heads, D] for the heads of q, where each of them has a selection of its own."""
    return x if groups == 1 else x.repeat_interleave(groups, -2)


def of_groups(gradient: Tensor, groups: int) -> Tensor:
    """The gradient of what :func:`repeated` was given."""
    return gradient if groups == 1 else gradient.unflatten(-2, (-1, groups)).sum(-2)


def tree_attention_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | DeviceMesh | None,
    *,
    index: Index | None = None,
    balance: Balance = "zigzag",
    return_lse: bool = False,
    gather_steps: int | None = None,
    options: TreeOptions | None = None,
    **keywords: Unpack[TreeKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`htree_ops.tree_attention` over a sequence whose tokens are split among the ranks of a group.

    Each rank has the tokens that :func:`shard_sequence` gives it, and gets their rows of the attention over the whole
    sequence. Keys and values are gathered; each rank builds the tree and attends for its own rows. The selection is
    that of one process, from all tokens. The backward gathers keys and values again. Their gradients stay in fp32 (fp64
    for fp64) until they are added over the ranks in a fixed order: every call gives the same bits. All ranks of the
    group must call.
    Source: docs/semantics/tree_attention.md §1.13; docs/distributed.md has memory, costs and limits.

    Args:
        q: this rank's queries [B, T/n, H, K].
        k: its keys [B, T/n, H_kv, K]. v: its values [B, T/n, H_kv, V].
        group: the ranks; None is the default group, a mesh must have one dimension. With one rank this is
            :func:`htree_ops.tree_attention`.
        index: (index_query [B, T/n, H_i, d], index_key [B, T/n, H_i, d]) of this rank, by which nodes are chosen as in
            :func:`htree_ops.tree_attention`; the index keys are gathered too. It gets no gradient.
        balance: "zigzag", "striped", "contiguous" or "work", as in :func:`shard_sequence`. 2 * n * r (striped:
            8 * n * r, contiguous: n * r, work: 16 * n * r) divides T.
        gather_steps: a divisor of H_kv, in so many steps keys and values are gathered and the attention runs, the one
            while the next is on its way; None chooses by the length. The rows do not depend on it.
        return_lse, options, keywords: as in :func:`htree_ops.tree_attention`.

    Returns:
        out [B, T/n, H, V], differentiable in q, k and v; with ``return_lse`` also lse [B, T/n, H] in fp32 (fp64 for
        fp64), differentiable in q and k. The rows are those of :func:`htree_ops.tree_attention` on the whole sequence,
        bit for bit, and on the CPU so is the gradient of q. The gradients of k and v differ by the order of their sums.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, ValueError, TypeError: as
            :func:`htree_ops.tree_attention`; a T that does not divide (the message names the next one that does);
            sizes, dtypes, devices, options or wanted gradients that differ between the ranks, on every rank.
        RuntimeError: another rank has refused its arguments.
        In compiled code a rank sees its own mistakes alone, and ranks that differ may wait for each other until the
        time-out of the group.
    """
    name = "tree_attention_cp"
    members = group_of(name, group)
    rank, size = members.rank(), members.size()
    if size == 1:
        check_balance(name, balance)
        chosen = tree_options(name, options, keywords)
        return tree_attention(q, k, v, index=index, return_lse=return_lse, options=chosen)
    q, k, v = under_autocast(q, k, v)
    if torch.compiler.is_compiling():
        chosen = options_of_call(name, index, options, keywords)
        _check(q, k, v, index, size, balance, chosen, gather_steps)
    else:
        with agreement(name, members) as (facts, same):
            chosen = options_of_call(name, index, options, keywords)
            _check(q, k, v, index, size, balance, chosen, gather_steps)
            facts |= facts_of(("the batch of q", "T/n"), q=q, k=k, v=v)
            same |= {**kind_of(q), "balance": balance, **chosen.to_dict(), "gather_steps": gather_steps}
            same |= kind_of_index(index)
    groups = q.shape[2] // k.shape[2] if chosen.scope == "q_head" else 1
    steps = gather_steps or choose_steps(k.shape[2], size * (k.numel() + v.numel()) * k.element_size(), size)
    plan = (members.group_name, rank, size, balance, groups, steps, chosen.store_parents)
    of_index = (None, None) if index is None else (index[0].detach(), index[1].detach())
    out, lse = _Attention.apply(q, k, v, *of_index, *plan, *chosen.packed())
    return (out, lse) if return_lse else out
