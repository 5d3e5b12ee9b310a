"""Tree attention and the fused operators on several devices, on torch.distributed (docs/distributed.md).

Importing it gives DTensor the sharding rules of the ops. ``import htree_ops`` alone does not import it.
"""

import torch.distributed as dist

if not dist.is_available():
    raise ImportError("htree_ops.distributed: this torch was built without torch.distributed")

from htree_ops.distributed import sharding
from htree_ops.distributed.context_parallel import tree_attention_cp
from htree_ops.distributed.documents import tree_attention_varlen_cp
from htree_ops.distributed.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from htree_ops.distributed.sequence import shard_sequence, unshard_sequence

sharding.register()

__all__ = [
    "ColwiseParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "shard_sequence",
    "tree_attention_cp",
    "tree_attention_varlen_cp",
    "unshard_sequence",
]
