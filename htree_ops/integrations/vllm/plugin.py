"""What the plug-in changes in vLLM: a backend named CUSTOM, on the CPU too, the size of its pages, and an index.

vLLM of the versions in :mod:`htree_ops.integrations.vllm.versions` lets a plug-in name a class for ``CUSTOM``, but its
CPU platform takes its own backend whatever is asked for, and a backend can neither say how large its pages are nor have
weights. The methods that do are wrapped; they do what they did for every other backend, but that its loader leaves the
weights of an index out.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from htree_ops.integrations.vllm.index import add_weights, check_weights, load_indexes
from htree_ops.integrations.vllm.versions import is_supported
from htree_ops.integrations.wrapping import wrap

BACKEND = "htree_ops.integrations.vllm.backend.HTreeBackend"


def register() -> None:
    """Makes ``--attention-backend CUSTOM`` tree attention. vLLM calls it; calling it again changes nothing."""
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if not is_supported(vllm.__version__):
        return  # who asks for CUSTOM gets the reason from the backend's module
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.models.utils import AutoWeightsLoader
    from vllm.platforms.cpu import CpuPlatform

    wrap(
        CpuPlatform,
        "get_attn_backend_cls",
        functools.partial(_choose_on_the_cpu, AttentionBackendEnum.CUSTOM),
    )
    wrap(Attention, "get_kv_cache_spec", _with_space_for_nodes)
    wrap(Attention, "__init__", _with_an_index)
    wrap(Attention, "process_weights_after_loading", _with_a_look_at_the_index)
    wrap(AutoWeightsLoader, "load_weights", functools.partial(load_indexes, Attention))


def _choose_on_the_cpu(
    custom: Any,
    choose: Any,
    cls: Any,
    selected_backend: Any,
    attn_selector_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``get_attn_backend_cls`` of the CPU platform, which heeds ``custom``."""
    if selected_backend is not custom or custom.get_path() != BACKEND:
        return choose(cls, selected_backend, attn_selector_config, *args, **kwargs)
    reasons = custom.get_class().validate_configuration(
        device_capability=None, **attn_selector_config._asdict()
    )
    if reasons:
        raise ValueError(f"htree: {'; '.join(reasons)}")
    return BACKEND


def _with_space_for_nodes(spec_of: Any, self: Any, vllm_config: Any) -> Any:
    """``get_kv_cache_spec`` of a layer, whose pages have space for nodes and span means where the backend is ours."""
    spec = spec_of(self, vllm_config)
    page_bytes = getattr(self.impl, "page_bytes", None)
    if page_bytes is None or self.attn_backend.full_cls_name() != tuple(BACKEND.rsplit(".", 1)):
        return spec
    return replace(spec, page_size_padded=page_bytes(spec, vllm_config))


def _with_an_index(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """``__init__`` of a layer, which has the weights of an index where the backend chooses by it."""
    init(self, *args, **kwargs)
    if index_dim := getattr(self.impl, "index_dim", 0):
        add_weights(self, (self.num_heads, self.num_kv_heads), self.head_size, index_dim)


def _with_a_look_at_the_index(process: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """``process_weights_after_loading`` of a layer, which checks that its index was loaded."""
    process(self, *args, **kwargs)
    if getattr(self.impl, "index_dim", 0):
        check_weights(self)
