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

from htree_ops.integrations.vllm.index import add_weights, check_weights, loads_indexes
from htree_ops.integrations.vllm.versions import is_supported

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

    chosen = CpuPlatform.get_attn_backend_cls.__func__
    if not hasattr(chosen, "plain"):
        CpuPlatform.get_attn_backend_cls = classmethod(
            _custom_on_the_cpu(chosen, AttentionBackendEnum.CUSTOM)
        )
    spec = Attention.get_kv_cache_spec
    if not hasattr(spec, "plain"):
        Attention.get_kv_cache_spec = _with_space_for_nodes(spec)
        Attention.__init__ = _with_an_index(Attention.__init__)
        Attention.process_weights_after_loading = _with_a_look_at_it(Attention.process_weights_after_loading)
        AutoWeightsLoader.load_weights = loads_indexes(AutoWeightsLoader.load_weights, Attention)


def _custom_on_the_cpu(chosen: Any, custom: Any) -> Any:
    """``get_attn_backend_cls`` of the CPU platform that heeds CUSTOM."""

    @functools.wraps(chosen)
    def choose(cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> Any:
        if selected_backend is not custom or custom.get_path() != BACKEND:
            return chosen(cls, selected_backend, attn_selector_config, *args, **kwargs)
        reasons = custom.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(f"htree: {'; '.join(reasons)}")
        return BACKEND

    choose.plain = chosen  # type: ignore[attr-defined]
    return choose


def _with_space_for_nodes(spec_of: Any) -> Any:
    """``get_kv_cache_spec`` of a layer whose pages have space for nodes and span means where the backend is ours."""

    @functools.wraps(spec_of)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = spec_of(self, vllm_config)
        page_bytes = getattr(self.impl, "page_bytes", None)
        if page_bytes is None or self.attn_backend.full_cls_name() != tuple(BACKEND.rsplit(".", 1)):
            return spec
        return replace(spec, page_size_padded=page_bytes(spec, vllm_config))

    get_kv_cache_spec.plain = spec_of  # type: ignore[attr-defined]
    return get_kv_cache_spec


def _with_an_index(init: Any) -> Any:
    """``__init__`` of a layer, which has the weights of an index where the backend chooses by it."""

    @functools.wraps(init)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if index_dim := getattr(self.impl, "index_dim", 0):
            add_weights(self, (self.num_heads, self.num_kv_heads), self.head_size, index_dim)

    return make


def _with_a_look_at_it(process: Any) -> Any:
    """``process_weights_after_loading`` of a layer, which checks that its index was loaded."""

    @functools.wraps(process)
    def process_weights_after_loading(self: Any, *args: Any, **kwargs: Any) -> None:
        process(self, *args, **kwargs)
        if getattr(self.impl, "index_dim", 0):
            check_weights(self)

    return process_weights_after_loading
