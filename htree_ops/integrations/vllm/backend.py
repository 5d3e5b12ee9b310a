"""The attention backend: a step of vLLM is an append to the pages and an attention from them (docs/vllm.md).

vLLM's block table is the table of pages as it is. Nodes of any size are exact under prefix caching: a node stands in
the page in which it ends, so what a full page holds follows from the tokens up to its end, and vLLM's key of a full
block is a hash over these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import vllm
from torch import Tensor

from htree_ops.integrations.vllm.versions import check_version

check_version(vllm.__version__)  # before names that another version may not have

from vllm import envs  # noqa: E402
from vllm.config import VllmConfig, get_current_vllm_config  # noqa: E402
from vllm.v1.attention.backend import (  # noqa: E402
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec  # noqa: E402

from htree_ops.integrations.vllm.index import rows_of_index  # noqa: E402
from htree_ops.integrations.vllm.pages import page_sizes, table_width  # noqa: E402
from htree_ops.integrations.vllm.settings import (  # noqa: E402
    check_engine,
    check_layer,
    layer_reasons,
    options_of_engine,
    refuse,
)
from htree_ops.integrations.vllm.steps import Step, Steps, attend_step, try_prompt  # noqa: E402

#: The block that wastes least: few rows of upper layers, and small enough to share.
PREFERRED_BLOCK = 256


class HTreeBackend(AttentionBackend):
    """Tree attention on vLLM's pages."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    #: A node needs the tokens before it, so tokens are appended where the block table is known.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[HTreeImpl]:
        return HTreeImpl

    @staticmethod
    def get_builder_cls() -> type[HTreeMetadataBuilder]:
        return HTreeMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(1)]  # of compression_rate, which check_engine knows

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, PREFERRED_BLOCK)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(cls, *, dtype: torch.dtype, **properties: Any) -> list[str]:
        reasons = layer_reasons(**properties)
        if dtype not in cls.supported_dtypes:
            reasons.append(f"--dtype must be float16, bfloat16 or float32, got {dtype}")
        return reasons


class HTreeMetadataBuilder(AttentionMetadataBuilder[Step]):
    """Makes a step of what the scheduler has decided. Graphs serve batches in which all sequences have as many rows."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.steps = Steps(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.scheduler_config.max_num_batched_tokens,
            kv_cache_spec.block_size,
            options_of_engine(vllm_config, kv_cache_spec.head_size).options,
            device,
            takes_prompts=device.type == "cuda" and not envs.VLLM_BATCH_INVARIANT,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        common = common_attn_metadata
        if common.causal is not True:
            refuse("only causal attention of a decoder is supported, got a step that is not causal")
        on_host = None
        if self.steps.takes_prompts and common.seq_lens_cpu_upper_bound is not None:
            on_host = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound.tolist()
        return self.steps.make(
            common.num_actual_tokens,
            common.max_query_len,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            on_host,
        )


class HTreeImpl(AttentionImpl[Step]):
    """Tree attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        check_layer(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            attn_type=attn_type,
            kv_cache_dtype=kv_cache_dtype,
            head_size=head_size,
        )
        config = get_current_vllm_config()
        served = options_of_engine(config, head_size)
        check_engine(config, served.options)
        self.options = replace(served.options, scale=float(scale))
        self.index_dim, self.says_a_width = served.index_dim, served.says_a_width
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.max_tokens = config.model_config.max_model_len

    def page_bytes(self, spec: AttentionSpec, config: VllmConfig) -> int:
        """Bytes of a page with its nodes and what chooses them."""
        if (
            type(spec) is not FullAttentionSpec
            or spec.sliding_window is not None
            or spec.attention_chunk_size
        ):
            refuse(f"only layers that attend to all tokens are supported, got the cache of {spec}")
        if spec.head_size_v != spec.head_size:
            refuse(f"values must have as many channels as keys, got {spec.head_size_v} and {spec.head_size}")
        check_engine(config, self.options)  # the block size may have been decided after the layers were made
        width = table_width(config.model_config.max_model_len, spec.block_size)
        sizes = page_sizes(self.options, spec.block_size, width, self.index_dim)
        count = sizes.elements(spec.num_kv_heads, spec.head_size, spec.head_size, spec.dtype)
        return count * spec.dtype.itemsize

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Appends keys and values [N, H_kv, K] to the pages and writes the rows of query [N, H, K] to ``output``."""
        if output_scale is not None or output_block_scale is not None:
            refuse(
                "an output in fewer bits is not supported: leave the fusion of attention and quantisation out"
            )
        index = rows_of_index(layer, query, key) if self.index_dim else None
        if attn_metadata is None:  # a run without a cache, in which vLLM measures what a step takes
            if query.is_cuda and not envs.VLLM_BATCH_INVARIANT:
                try_prompt(self.options, query, key, value, self.max_tokens, index)
            return output.zero_()
        rows = output.view(-1, self.num_heads, self.head_size)
        attend_step(self.options, kv_cache, query, key, value, attn_metadata, rows, index)
        return output
