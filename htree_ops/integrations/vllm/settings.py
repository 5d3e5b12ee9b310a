"""What an engine asks of the backend: its options, and what is refused with the nearest thing that works."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from htree_ops.ops.tree_attention.index import resolve_index_dim
from htree_ops.ops.tree_attention.options import TreeOptions, recommended_options
from htree_ops.ops.tree_cache.ring import RING

DENSE = "leave --attention-backend out for dense attention"
#: Speculative decoding without a draft model: nothing but drafts of tokens comes into the engine.
WITHOUT_DRAFT_MODEL = ("ngram", "ngram_gpu", "suffix")
#: dtypes of a cache that hold keys and values as the model computes them.
PLAIN_CACHES = ("auto", "float16", "bfloat16", "float32")


def refuse(reason: str) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError(f"htree: {reason}")


class Served(NamedTuple):
    """What all layers of an engine compute.

    Attributes:
        options: of tree attention. index_dim: of the index by which they choose, 0 for none.
        says_a_width: whether ``config.htree`` says so; where it does not, a checkpoint must have no index.
    """

    options: TreeOptions
    index_dim: int = 0
    says_a_width: bool = False


def options_of_engine(config: Any, head_dim: int) -> Served:
    """``config.htree`` of the checkpoint, else the recommended options for quality without an index.

    Args:
        config: a VllmConfig. head_dim: of keys.
    """
    from htree_ops.integrations.index import ABSENT  # takes seconds
    from htree_ops.integrations.transformers import options_of_config

    model = config.model_config.hf_text_config
    chosen = options_of_config(model)
    if chosen.compact:
        refuse(
            "config.htree['positions'] must be 'own', got 'compact': vLLM rotates queries and keys before attention "
            "sees them"
        )
    if not getattr(model, "htree", None):
        return Served(recommended_options("htree", "quality", {"rope_base": None}, by_index=False))
    options = TreeOptions(**chosen.options, rope_base=None)
    if options.importance == "lse":
        refuse(
            "config.htree['importance'] must be 'lse_causal' or 'exp_joint', got 'lse': it weighs nodes that are not "
            "finished, which pages do not hold"
        )
    if options.scope != "kv_head":
        refuse(
            f"config.htree['scope'] must be 'kv_head', got {options.scope!r}: pages hold keys and values once"
        )
    if chosen.index_dim == ABSENT:
        return Served(options)
    index_dim = resolve_index_dim("config.htree", chosen.index_dim, head_dim, options)
    return Served(options.beside_index() if index_dim else options, index_dim, says_a_width=True)


def layer_reasons(
    *,
    kv_cache_dtype: str | None = None,
    use_mla: bool = False,
    has_sink: bool = False,
    use_sparse: bool = False,
    use_mm_prefix: bool = False,
    use_per_head_quant_scales: bool = False,
    attn_type: str = "decoder",
    has_sliding_window: bool = False,
    use_non_causal: bool = False,
    use_kv_connector: bool = False,
    use_pcp: bool = False,
    head_size: int = 64,
    **_: Any,
) -> list[str]:
    """Why a layer with these properties, named as vLLM's selector names them, is not served; empty if it is."""
    found = []
    if use_mla:
        found.append(f"multi-head latent attention (MLA) has no keys of heads: {DENSE}")
    if use_sparse:
        found.append(f"a model with sparse attention of its own is not supported: {DENSE}")
    if has_sliding_window:
        found.append(
            "a sliding window is not supported: give --hf-overrides '{\"sliding_window\": null}' if the model shall "
            f"attend to everything, or {DENSE}"
        )
    if has_sink:
        found.append(f"attention sinks are not supported: {DENSE}")
    if use_mm_prefix or use_non_causal or attn_type != "decoder":
        found.append(f"only causal attention of a decoder is supported: {DENSE}")
    if use_per_head_quant_scales or (kv_cache_dtype or "auto") not in PLAIN_CACHES:
        found.append(
            f"--kv-cache-dtype must be auto, float16 or bfloat16, got {kv_cache_dtype}: nodes are means of keys and "
            "values as they are stored"
        )
    if use_kv_connector:
        found.append(
            "a KV connector is not supported, because it would move blocks without their nodes: leave "
            "--kv-transfer-config out"
        )
    if use_pcp:
        found.append(
            "context parallelism of prompts is not supported: set --prefill-context-parallel-size 1, or use tensor "
            "parallelism"
        )
    if head_size % 2:
        found.append(f"the heads must have an even number of channels, got {head_size}: {DENSE}")
    return found


def check_layer(
    *,
    alibi_slopes: Any = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    kv_sharing_target_layer_name: str | None = None,
    attn_type: str = "decoder",
    kv_cache_dtype: str = "auto",
    head_size: int = 64,
) -> None:
    """Raises NotImplementedError for what a layer of the model asks for beyond causal attention."""
    reasons = layer_reasons(
        kv_cache_dtype=kv_cache_dtype,
        has_sink=sinks is not None,
        attn_type=attn_type,
        has_sliding_window=sliding_window is not None,
        head_size=head_size,
    )
    if logits_soft_cap:
        reasons.append(f"a soft cap of the scores is not supported, got {logits_soft_cap}: {DENSE}")
    if alibi_slopes is not None:
        reasons.append(f"ALiBi is not supported, only rotary positions: {DENSE}")
    if kv_sharing_target_layer_name is not None:
        reasons.append(f"layers that share the cache of another one are not supported: {DENSE}")
    if reasons:
        refuse("; ".join(reasons))


def check_engine(config: Any, options: TreeOptions) -> None:
    """Raises NotImplementedError or ValueError for an engine whose sizes or features do not fit.

    Args:
        config: a VllmConfig. options: of :func:`options_of_engine`.
    """
    rate, block = options.compression_rate, config.cache_config.block_size
    if block % rate:
        nearest = max(rate, round(block / rate) * rate)
        raise ValueError(
            f"htree: --block-size must be a multiple of compression_rate = {rate}, got {block}: give --block-size "
            f"{nearest}, or 256, with which nodes take the least memory"
        )
    stride = options.selection_stride
    parallel, speculative = config.parallel_config, config.speculative_config
    if parallel.decode_context_parallel_size > 1:
        refuse(
            "context parallelism of decoding is not supported, got --decode-context-parallel-size "
            f"{parallel.decode_context_parallel_size}: set it to 1, or use tensor parallelism"
        )
    if speculative is not None and speculative.method not in WITHOUT_DRAFT_MODEL:
        refuse(
            f"speculative decoding with a draft model is not supported, got method {speculative.method!r}: use one of "
            f"{', '.join(WITHOUT_DRAFT_MODEL)}"
        )
    if stride > 1 and speculative is not None and speculative.num_speculative_tokens > (RING - 1) * stride:
        raise ValueError(
            f"htree: num_speculative_tokens must be at most {RING - 1} times selection_stride = {stride}, got "
            f"{speculative.num_speculative_tokens}: pages keep the lists of {RING} leaders"
        )
    model = config.model_config
    if getattr(model, "is_hybrid", False):
        refuse(f"a model with layers of state is not supported: {DENSE}")
    if getattr(model.hf_text_config, "attention_chunk_size", None):
        refuse(f"attention in chunks is not supported: {DENSE}")
