"""Columns of one layer with a cache that come in any way, beside attention over the whole sequence."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from small_models import SPARSE, make_model

from htree_ops import TreeOptions
from htree_ops.integrations.documents import attend_padded
from htree_ops.integrations.transformers import attention
from htree_ops.ops.tree_attention.index import TreeOf


@functools.cache
def make_attention(stride: int) -> Any:
    model = make_model(options=SPARSE | {"selection_stride": stride}, num_hidden_layers=1)
    return model.model.layers[0].self_attn


def check_columns(
    data: st.DataObject,
    strides: Sequence[int],
    make_cache: Callable[[Any, int], Any],
    most_back: Callable[[int, int, int], int],
) -> tuple[Any, int]:
    """Any mask, any cuts, columns that are taken back, sequences that become others.

    Args:
        make_cache: of a config and the most columns. most_back: how many columns may be taken back, by those that are
            there, the most that were there, and the stride.

    Returns:
        The cache, and the columns that it holds at the end.
    """
    batch, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    stride = data.draw(st.sampled_from(strides))
    layer = make_attention(stride)
    masked = data.draw(st.booleans())
    rows = st.lists(st.booleans() if masked else st.just(True), min_size=columns, max_size=columns)
    real = torch.tensor(data.draw(st.lists(rows, min_size=batch, max_size=batch)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    q, k, v = (torch.randn(batch, columns, heads, 8, generator=generator) for heads in (4, 2, 2))
    tree = TreeOf("htree", TreeOptions(**layer.config.htree, rope_base=None), layer, by_index=False)
    cache = make_cache(layer.config, columns)
    done = most = 0
    while done < columns:
        n = data.draw(st.integers(1, columns - done))
        part = slice(done, done + n)
        wanted = attend_padded(q, k, v, real, tree)[:, part]
        handed = cache.update(*(x[:, part].transpose(1, 2) for x in (k, v)), 0)
        mask = None if bool(real.all()) else real[:, : done + n]
        got, _ = attention(layer, q[:, part].transpose(1, 2), *handed, mask)
        torch.testing.assert_close(got, wanted)
        done += n
        most = max(most, done)
        step = data.draw(st.sampled_from(["go on", "go on", "crop", "reorder"]))
        if step == "crop" and done < columns:
            back = data.draw(st.integers(0, max(0, most_back(done, most, stride))))
            cache.crop(-back)
            done -= back
            fresh = torch.randn(q.shape, generator=generator)
            q = torch.cat([q[:, :done], fresh[:, done:]], 1)
            k = torch.cat([k[:, :done], fresh[:, done:, :2]], 1)
        elif step == "reorder":
            order = torch.tensor(
                data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
            )
            cache.reorder_cache(order)
            q, k, v, real = (x[order] for x in (q, k, v, real))
    return cache, columns
