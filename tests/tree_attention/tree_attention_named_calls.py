"""One correct call of every op of tree attention, as a dict of arguments that tests change one by one.

B=2 T=20 T_q=12 H=4 H_kv=2 K=6 V=5 r=4 k=2 M=8; the layer is layer 1 with 5 nodes. Packed options stand by their names.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.support.tree_attention_calls import calls
from tests.support.tree_attention_cases import TreeAttentionCase
from tests.support.tree_attention_problem import packed

CASE = TreeAttentionCase(
    name="named", dtype=torch.float32, B=2, T=20, num_queries=12, H=4, H_kv=2, K=6, V=5, r=4, top_k=2, M=8
)
OPTIONS = ("compression_rate", "max_top_nodes", "top_k_per_layer", "scale", "rope_base", "importance")
OPTIONS += ("selection_stride",)


@cache
def named_calls(device: str) -> dict[str, dict[str, Any]]:
    """The arguments of every op by their names, those with their defaults among them."""
    found: dict[str, dict[str, Any]] = {}
    for call in calls(CASE, device):
        declared = call.overload._schema.arguments
        given = {x.name: x.default_value for x in declared}
        given |= dict(zip((x.name for x in declared), call.args, strict=False)) | call.kwargs
        if "option_ints" in given:
            del given["option_ints"], given["option_floats"]
            given |= dict(zip(OPTIONS, CASE.op_options(), strict=True))
        found.setdefault(call.op, given)
    return found


CALLS = named_calls("cpu")


def make_call(op: str, device: str, **changes: Any) -> Any:
    """Call torch.ops.htree.<op> with the correct arguments, some of them replaced."""
    arguments = {
        name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in named_calls(device)[op].items()
    } | changes
    if "option_ints" in (x.name for x in getattr(torch.ops.htree, op).default._schema.arguments):
        given = packed(**{name: arguments.pop(name) for name in OPTIONS})
        arguments |= dict(zip(("option_ints", "option_floats"), given, strict=True))
    return getattr(torch.ops.htree, op)(**arguments)
