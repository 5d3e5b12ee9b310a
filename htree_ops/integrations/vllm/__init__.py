"""Tree attention in vLLM: a plug-in that adds the attention backend ``CUSTOM`` (docs/vllm.md).

    vllm serve MODEL --attention-backend CUSTOM --block-size 256

The options are ``config.htree`` of the checkpoint, as for transformers. Without ``CUSTOM`` nothing changes.
vLLM loads :func:`register` by itself, in each of its processes.
"""

from __future__ import annotations

from htree_ops.integrations.vllm.plugin import register
from htree_ops.integrations.vllm.versions import SUPPORTED

__all__ = ["SUPPORTED", "register"]
