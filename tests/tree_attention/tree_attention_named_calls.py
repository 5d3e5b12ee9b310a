"""One correct call of every op of tree attention, as a dict of arguments that tests change one by one.

B=2 T=20 T_q=12 H=4 H_kv=2 K=6 V=5 r=4 k=2 M=8; the layer is layer 1 with 5 nodes. Callables make a tensor
(or a list of them) on a device.
"""

from __future__ import annotations

import torch

from htree_ops.reference import tree_attention as ref
from tests.support.tree_attention_problem import packed


def normal(*shape):
    def make(device):
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator).to(device)

    return make


def ones(*shape):
    return lambda device: torch.ones(shape, device=device)


def lists(*, heads=2, layer=1):
    """Lists of the 12 queries from token 8, for layer 1 (the virtual ones) or for the bottom."""

    def make(device):
        if layer == 1:
            return ref.top_parents(2, 12, heads, 2, 2, 4, 8).to(device)
        own = (torch.arange(8, 20) // 4).to(torch.int32)
        pair = torch.stack([torch.zeros_like(own), own], dim=-1)
        return pair[None, :, None].expand(2, 12, heads, 2).contiguous().to(device)

    return make


def table(index):
    return lambda device: ref.rope_cache(8, 6)[index].to(device)


def counts(device):
    return torch.full((2, 12, 2), 5, dtype=torch.int32, device=device)


def positions(device):
    return torch.tensor([4, 1], dtype=torch.int32, device=device).expand(2, 12, 2, 2).contiguous()


def indices(device):
    return torch.tensor([4, 1], dtype=torch.int32, device=device).expand(2, 12, 4, 2).contiguous()


OPTIONS = {
    "compression_rate": 4,
    "max_top_nodes": 8,
    "top_k_per_layer": 2,
    "scale": None,
    "rope_base": 10000.0,
    "importance": "lse_causal",
    "selection_stride": 1,
}
QKV = {"q": normal(2, 12, 4, 6), "k": normal(2, 20, 2, 6), "v": normal(2, 20, 2, 5)}
QUERY = {"q": normal(2, 12, 4, 6), "layer_k": normal(2, 5, 2, 6)}
TABLE = {"cos": table(0), "sin": table(1)}
PLACE = {"layer": 1, "compression_rate": 4}
STATE = {"lmax": ones(2, 12, 4), "lsum": ones(2, 12, 4), "lout": normal(2, 12, 4, 5)}
GLOBAL = {"gmax": ones(2, 12, 4), "gsum": ones(2, 12, 4), "gout": normal(2, 12, 4, 5)}

CALLS = {
    "tree_build": {"k": QKV["k"], "v": QKV["v"], "compression_rate": 4},
    "tree_build_backward": {
        "dpk": normal(2, 5, 2, 6),
        "dpv": normal(2, 5, 2, 5),
        "n_child": 20,
        "compression_rate": 4,
    },
    "span_means": {"k": QKV["k"], "span": 2},
    "rope_cache": {"size": 8, "dim": 6, "base": 1e4},
    "rope": {
        "x": normal(2, 12, 4, 6),
        **TABLE,
        "positions": lambda device: torch.arange(12, device=device) % 8,
        "inverse": False,
    },
    "top_parents": {
        "B": 2,
        "T": 12,
        "heads": 2,
        "top_k": 2,
        "num_layers": 2,
        "compression_rate": 4,
        "t0": 8,
        "selection_stride": 1,
    },
    "compute_scores": {**QUERY, "parents": lists(), **TABLE, **PLACE, "scale": None, "t0": 8},
    "select_topk": {
        "scores": normal(2, 12, 2, 8, 2),
        "num_candidates": counts,
        "top_k": 2,
        "importance": "lse_causal",
    },
    "mask_topk_scores_": {"scores": normal(2, 12, 2, 8, 2), "topk_positions": positions},
    "compute_next_parents": {"parents": lists(), "topk_positions": positions, "compression_rate": 4},
    "accumulate_non_topk": {
        "layer_v": normal(2, 5, 2, 5),
        "parents": lists(),
        "scores": normal(2, 12, 2, 8, 2),
        "num_candidates": counts,
        **PLACE,
        "t0": 8,
    },
    "compute_and_select": {
        **QUERY,
        "layer_v": normal(2, 5, 2, 5),
        "parents": lists(heads=4),
        **TABLE,
        **PLACE,
        "top_k": 2,
        "scale": None,
        "t0": 8,
    },
    "subtract_topk": {
        "layer_v": normal(2, 5, 2, 5),
        "topk_indices": indices,
        "topk_scores": normal(2, 12, 4, 2),
        **STATE,
    },
    "select_accumulate": {
        **QUERY,
        "layer_v": normal(2, 5, 2, 5),
        "parents": lists(),
        **TABLE,
        **PLACE,
        "top_k": 2,
        "scale": None,
        "importance": "lse_causal",
        "t0": 8,
        "selection_stride": 1,
    },
    "bottom_accumulate": {
        **QUERY,
        "layer_v": normal(2, 5, 2, 5),
        "parents": lists(layer=0),
        **TABLE,
        "compression_rate": 4,
        "scale": None,
        "t0": 8,
        "selection_stride": 1,
    },
    "recompute_selection": {
        **QUERY,
        "parents": lists(),
        **TABLE,
        **PLACE,
        "top_k": 2,
        "scale": None,
        "importance": "lse_causal",
        "t0": 8,
        "selection_stride": 1,
    },
    "merge_to_global_": {**GLOBAL, **STATE},
    "final_normalize": {"gout": GLOBAL["gout"], "gsum": GLOBAL["gsum"], "dtype": None},
    "attention_forward": {**QKV, **OPTIONS, "store_parents": True},
    "attention": {**QKV, **OPTIONS, "store_parents": True},
    "tree_attention": {**QKV, **OPTIONS, "store_parents": True},
    "_attention_lse": {**QKV, "store_parents": True, **OPTIONS},
    "_attention_rows": {**QKV, "starts": [8], "store_parents": True, **OPTIONS},
    "attention_backward": {
        "dout": normal(2, 12, 4, 5),
        **QKV,
        "out": normal(2, 12, 4, 5),
        "gmax": ones(2, 12, 4),
        "gsum": ones(2, 12, 4),
        "parents": lambda device: [lists(layer=0)(device), lists()(device)],
        **OPTIONS,
        "output_mask": [True, True, True],
    },
    "_attention_rows_backward": {
        "dout": normal(2, 12, 4, 5),
        "dlse": normal(2, 12, 4),
        **QKV,
        "out": normal(2, 12, 4, 5),
        "gmax": ones(2, 12, 4),
        "gsum": ones(2, 12, 4),
        "lists": lambda device: torch.cat([lists(layer=0)(device), lists()(device)], 1),
        "starts": [8],
        "output_mask": [True, True, True],
        **OPTIONS,
    },
}
CALLS["_attention_rows_backward_sums"] = CALLS["_attention_rows_backward"]


def make_call(op, device, **changes):
    """Call torch.ops.htree.<op> with the correct arguments, some of them replaced."""
    arguments = {
        name: value(device) if callable(value) else value
        for name, value in {**CALLS[op], **changes}.items()
    }  # fmt: skip
    if op in ("rope_cache", "top_parents"):
        arguments["device"] = device
    if op.startswith("_"):
        given = packed(**{name: arguments.pop(name) for name in OPTIONS})
        arguments |= dict(zip(("option_ints", "option_floats"), given, strict=True))
    return getattr(torch.ops.htree, op)(**arguments)
