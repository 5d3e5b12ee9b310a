"""The loss by which an index learns the masses of an attention (docs/semantics/index_loss.md §9.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.errors import ShapeMismatchError, refuse
from htree_ops.ops.arguments import check_int, validate_arguments
from htree_ops.ops.ranks import beside, drawn_once, here


@validate_arguments
def index_loss(
    query: Tensor,
    key: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    *,
    scale: float | None = None,
    block_size: int = 16,
    rows: int = 128,
    generator: torch.Generator | None = None,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """How far the block scores of an index are from the attention that it stands for, at a few positions, in nats.

    At a position t the blocks wholly before t's own have two distributions. p is that of the attention: for each query
    head of an index head the exact softmax of ``scale * <query[t], key>`` over all tokens of these blocks, summed per
    block; then the mean over the heads. The other is the softmax of the block scores of
    :func:`htree_ops.select_blocks`, ``max over the block's tokens j of <index_query[t], index_key[j]>``.
    The loss is the mean over positions and index heads of KL(p ‖ softmax(scores)): what a learned index minimises.
    Source: docs/semantics/index_loss.md §9.3.

    Args:
        query: [B, T, H, K], as the attention takes it (rotated where that rotates); float32, float16, bfloat16, on the
            CPU also float64.
        key: [B, T, H_kv, K]; H is a multiple of H_kv.
        index_query, index_key: [B, T, H_i, d] with d a multiple of 16 up to 128. H_i is H_kv, or 1 where all K/V heads
            share an index. All tensors have one dtype and device.
        scale: of the attention's scores; None is 1/sqrt(K).
        block_size: tokens of a block.
        rows: positions that are drawn for each sequence, uniformly and with replacement, among the tokens that have an
            earlier block. With ``cu_seqlens`` for all documents together. Not read where ``positions`` is given.
        generator: draws them, on its own device; None is the default generator of query's device.
        positions: int64 [rows] for all sequences, or [B, rows]; with ``cu_seqlens`` [rows], rows of query. Each has an
            earlier block in its document.
        cu_seqlens: int32 [documents + 1]: the tensors are packed documents without a batch, [N, H, K] and so on.
            Document i is cu_seqlens[i] ... cu_seqlens[i + 1] - 1, and its blocks count from its first token. Rows at or
            behind cu_seqlens[-1] are padding.

    Returns:
        A scalar in float32 (float64 for float64), 0 where there is no position.

    Gradients go to index_query and index_key alone; query and key are constants. That of a maximum goes to the first
    token that has it. A NaN among what a position counts makes the loss NaN. Nothing as large as positions times tokens
    is held: at most 256 MB beside arguments and gradients.

    Raises:
        ShapeMismatchError: a rank or size that does not fit; d that is no multiple of 16 up to 128; key without a token
            behind its first block, where positions are drawn.
        UnsupportedDtypeError: a dtype that is not supported, or different ones; float64 on CUDA.
        DeviceError: tensors on different devices.
        ValueError: an option outside its range; on the CPU a position without an earlier block, offsets that descend,
            or documents none of which is longer than a block. On CUDA such positions are left out.
        NotImplementedError: the gradient of a gradient.

    Example:
        >>> query, key = torch.randn(1, 256, 4, 32), torch.randn(1, 256, 2, 32)
        >>> index_query = torch.randn(1, 256, 2, 16, requires_grad=True)
        >>> index_key = torch.randn(1, 256, 2, 16, requires_grad=True)
        >>> loss = index_loss(query, key, index_query, index_key, rows=8)
        >>> loss.backward()
        >>> loss.shape, bool(loss > 0)
        (torch.Size([]), True)
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"index_loss: generator must be a torch.Generator or None, got {type(generator).__name__}"
        )
    if positions is None:
        drawn = draw_positions(query, key, rows, block_size, generator, cu_seqlens)
        positions = drawn_once(drawn, query)
    tensors = (query, key, index_query, index_key, beside(positions, query))
    ends = None if cu_seqlens is None else beside(cu_seqlens, query)
    loss: Tensor = torch.ops.htree.index_loss(*tensors, ends, scale=scale, block_size=block_size)
    return loss


def draw_positions(
    query: Tensor,
    key: Tensor,
    rows: int,
    block_size: int,
    generator: torch.Generator | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Positions int64 [B, rows] that have an earlier block, with ``cu_seqlens`` [rows]; on query's device.

    Nothing is read on the host where the offsets are on CUDA.
    """
    cu_seqlens = None if cu_seqlens is None else here(cu_seqlens)
    check_int("index_loss", "rows", rows, 0)
    if cu_seqlens is None:
        T = key.shape[1] if key.dim() == 4 else block_size + 1  # the op refuses other ranks
        if not block_size < T:
            refuse(
                ShapeMismatchError,
                f"index_loss: key must have more than block_size = {block_size} tokens, got {T} in "
                f"{list(key.shape)}",
                actual=tuple(key.shape),
                tensor_name="key",
            )
        size = (query.shape[0] if query.dim() == 4 else 1, rows)
        device = query.device if generator is None else generator.device
        drawn = torch.randint(block_size, T, size, generator=generator, device=device)
        return drawn.to(query.device, non_blocking=True)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0 or cu_seqlens.device != query.device:
        return torch.zeros(rows, dtype=torch.int64, device=query.device)  # the op refuses these offsets
    lengths = cu_seqlens.long().diff()
    on_host = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and rows > 0 and not bool((lengths > block_size).any()):
        raise ValueError(
            f"index_loss: cu_seqlens must have a document of more than block_size = {block_size} tokens, got "
            f"{int(lengths.max()) if len(lengths) else 0} in the longest"
        )
    return draw_among(cu_seqlens[:-1], lengths, rows, block_size, generator)


def draw_among(
    starts: Tensor, lengths: Tensor, rows: int, block_size: int, generator: torch.Generator | None = None
) -> Tensor:
    """Positions int64 [rows] in documents that begin at ``starts`` and have ``lengths`` tokens, each equally likely.

    They are -1 where no document is longer than a block.
    """
    device = lengths.device if generator is None else generator.device
    if len(lengths) == 0:
        return torch.full((rows,), -1, dtype=torch.int64, device=lengths.device)
    counted = (lengths.long() - block_size).clamp_min(0)  # tokens that have an earlier block
    until = counted.cumsum(0)
    chances = torch.rand(rows, generator=generator, device=device, dtype=torch.float64)
    place = (chances.to(lengths.device, non_blocking=True) * until[-1]).long().minimum(until[-1] - 1)
    document = torch.searchsorted(until, place, right=True).clamp_max(len(lengths) - 1)
    found = starts.long()[document] + block_size + place - (until - counted)[document]
    return found.masked_fill(until[-1] == 0, -1)
