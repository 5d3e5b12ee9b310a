"""Tree attention in Hugging Face transformers 5: ``attn_implementation="htree"`` (docs/models.md).

    from htree_ops.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="htree")

The options are ``config.htree``, a dict that is saved with the model. What tree attention does not compute is refused
where the masks of a batch are made or where attention is called, in one line that says what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import causal_mask_function
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding
from transformers.utils.import_utils import is_tracing

from htree_ops.integrations import index, quantizer
from htree_ops.integrations.cache import CACHE, HandedOver, TreeCache
from htree_ops.integrations.documents import (
    attend_cached,
    attend_padded,
    attend_read_documents,
    attend_restarting,
    has_restarts,
    restarts,
)
from htree_ops.integrations.leaders import LeaderLayer, keep_leaders, leaders_of
from htree_ops.integrations.wrapping import wrap
from htree_ops.ops.arguments import check_dtype, check_tensors, constant_in_traces, validate_arguments_as
from htree_ops.ops.index_loss.collector import is_fitting
from htree_ops.ops.tree_attention import TreeOptions
from htree_ops.ops.tree_attention.index import TreeOf
from htree_ops.ops.tree_attention.options import NAMES, tree_options

__all__ = ["NAME", "TreeCache", "options_of_config", "refuse_without_interface", "register"]

#: The value of ``attn_implementation``.
NAME = "htree"
Positions = Literal["own", "compact"]
POSITIONS: tuple[Positions, ...] = ("own", "compact")
#: Options of tree attention that the model decides.
OF_THE_MODEL = ("scale", "rope_base", "inv_freq")
#: Kinds of scaled rotary positions whose frequencies are the same for every sequence length, and fill whole heads.
SCALED = ("linear", "llama3", "proportional", "yarn")
#: Attention classes whose rotary module :func:`register` can switch off, and that module.
ROTARY: dict[type[nn.Module], type[nn.Module]] = {
    LlamaAttention: LlamaRotaryEmbedding,
    MistralAttention: MistralRotaryEmbedding,
    Qwen3Attention: Qwen3RotaryEmbedding,
}
#: Tensors among the keywords of an attention call that do not change what attention computes.
HARMLESS = frozenset(
    (
        "cache_position",
        "labels",
        "num_items_in_batch",
        "position_ids",
        "seq_idx",
        "shift_labels",
        "token_type_ids",
    )
)
#: What to do with a model, or with a part of one, that tree attention cannot serve.
PART = "{'text_config': 'htree'} for the language model of a model with several parts"
ELSEWHERE = f"use attn_implementation='sdpa', or {PART}"
#: Kinds of layers, as a config calls them, that have no window.
WITHOUT_WINDOW = frozenset(("full_attention", "linear_attention"))
#: Keywords that change it, and what to do about each.
REFUSED = {
    "sliding_window": "a window of attention, sliding or in chunks, is not supported: make each of config.layer_types "
    "'full_attention', or set config.sliding_window = None in a config that has no layer_types",
    "softcap": "a soft cap of the scores is not supported: use attn_implementation='eager'",
    "s_aux": "attention sinks are not supported: use attn_implementation='eager'",
    "sinks": "attention sinks are not supported: use attn_implementation='eager'",
    "position_bias": "a bias of the scores is not supported: use attn_implementation='eager'",
    "attention_bias": "a bias of the scores is not supported: use attn_implementation='eager'",
    "head_mask": "a mask of heads is not supported: use attn_implementation='eager'",
    "cache": "a paged cache (continuous batching) is not supported: use generate()",
}
PACKED_AND_COMPILED = (
    "a compiled model does not look where position_ids start again: set config.htree['packed'] = True, give "
    "cu_seq_lens_q, or do not compile"
)
PACKED_AND_CACHED = "a cache holds one document per sequence: give packed documents to a call without a cache"

_default_positions: Positions = "own"


def register(positions: Positions | None = None) -> None:
    """Makes ``attn_implementation="htree"`` known to transformers, and models with FP8 layers loadable.

    Calling it again changes the default of ``positions`` alone.

    Args:
        positions: for models whose ``config.htree`` has no key "positions". "own": the model rotates queries and keys
            as it always does, at the tokens' positions, and the tree pools rotated keys. "compact": they stay
            unrotated, and the tree rotates them by their place in the query's list of candidates, as
            :func:`htree_ops.tree_attention` does by itself; for models of Llama, Mistral and Qwen3 whose frequencies do
            not follow the length of a sequence (plain, linear, Llama 3, YaRN, proportional). While a sequence is no
            longer than ``max_top_nodes`` the two are the same attention. None is "own".

    Raises:
        ValueError: another word.
    """
    global _default_positions
    if positions is not None and positions not in POSITIONS:
        raise ValueError(f"htree: positions must be one of {', '.join(POSITIONS)}, got {positions!r}")
    _default_positions = positions or "own"
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    for rotary in ROTARY.values():
        wrap(rotary, "forward", _rotate_unless_compact)
    wrap(PreTrainedModel, "get_correct_attn_implementation", _choose_with_interface)
    wrap(PreTrainedModel, "post_init", _add_indexes)
    wrap(PreTrainedModel, "_initialize_weights", index.draw_where_missing)
    wrap(DynamicCache, "__init__", _keep_leaders)
    quantizer.register()


def implementations(config: PretrainedConfig) -> str | dict[str, Any]:
    """The attention of a model, and where it has parts that of each, as ``set_attn_implementation`` takes them."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    own = config._attn_implementation
    if not any(parts.values()):
        return own
    return {"": own} | {name: implementations(part) for name, part in parts.items() if part is not None}


def refuse_without_interface(kind: type[PreTrainedModel]) -> None:
    """Refuses a model of transformers that computes its attention itself, whatever ``attn_implementation`` says.

    Some of these ask for a mask, and would take None for attention to every token; others ask for nothing.
    """
    if kind.__module__.startswith("transformers.models.") and not kind._can_set_attn_implementation():
        _refuse(
            f"{kind.__name__} does not use the attention interface of transformers: leave attn_implementation out, or "
            f"give {PART}"
        )


def _choose_with_interface(
    choose: Any, self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
) -> Any:
    """How a model finds the implementation for what was asked: not htree for one that ignores it."""
    if requested_attention == NAME:
        refuse_without_interface(type(self))
    return choose(self, requested_attention, *args, **kwargs)


# ---- options


class Choices(NamedTuple):
    """What ``config.htree`` says.

    Attributes:
        options: keywords of :func:`htree_ops.tree_attention`.
        compact: whether the tree rotates, and not the model.
        packed: whether a compiled model looks where position_ids start again; without torch.compile it always does.
        index_dim: the width of the index by which nodes are chosen, 0 for none; None is what fits the heads.
    """

    options: dict[str, Any]
    compact: bool
    packed: bool
    index_dim: int | None


def options_of_config(config: PretrainedConfig) -> Choices:
    """What ``config.htree`` says, with defaults for what it does not; else TypeError or ValueError."""
    given = getattr(config, "htree", None)
    given = {} if given is None else given
    if isinstance(given, str) and given == "recommended":
        given = index.RECOMMENDED
    if not isinstance(given, Mapping):
        kind = repr(given) if isinstance(given, str) else type(given).__name__
        raise TypeError(f"htree: config.htree must be a dict of options or 'recommended', got {kind}")
    options = dict(given)
    index_dim = options.pop(index.KEY, index.ABSENT)
    positions = options.pop("positions", _default_positions)
    if positions not in POSITIONS:
        raise ValueError(
            f"htree: config.htree['positions'] must be one of {', '.join(POSITIONS)}, got {positions!r}"
        )
    packed = options.pop("packed", False)
    if not isinstance(packed, bool):
        raise TypeError(f"htree: config.htree['packed'] must be a bool, got {type(packed).__name__}")
    for name in options:
        if name in OF_THE_MODEL or name not in NAMES:
            known = ["positions", "packed", index.KEY, *(x for x in NAMES if x not in OF_THE_MODEL)]
            raise ValueError(f"htree: config.htree must have keys among {', '.join(known)}, got {name!r}")
    return Choices(options, positions == "compact", packed, index_dim)


def _width_and_options(config: PretrainedConfig) -> tuple[int | None, TreeOptions]:
    """index_dim of a config that has one, and the options beside it."""
    choices = options_of_config(config)
    return choices.index_dim, tree_options("config.htree", None, choices.options)


def _add_indexes(post_init: Any, self: PreTrainedModel) -> None:
    """Gives the attentions of a model, before its weights are drawn or loaded, the index that their config says."""
    index.add_indexes(self, _width_and_options)
    post_init(self)


def _keep_leaders(init: Any, self: DynamicCache, *args: Any, **kwargs: Any) -> None:
    """Makes a cache whose layers keep leaders where its model has a stride above 1."""
    init(self, *args, **kwargs)
    config = kwargs.get("config", args[1] if len(args) > 1 else None)
    if config is not None:
        keep_leaders(self, _stride_of(config.get_text_config(decoder=True)))


def _stride_of(config: PretrainedConfig) -> int:
    """selection_stride of a model with this config, 1 where it has another attention or a value that is refused."""
    if config._attn_implementation != NAME:
        return 1
    stride = options_of_config(config).options.get("selection_stride", 1)
    return stride if isinstance(stride, int) else 1


def _refuse(message: str) -> NoReturn:
    raise NotImplementedError(f"htree: {message}")


# ---- positions


def has_compact_positions(config: PretrainedConfig) -> bool:
    """Whether the tree rotates, and not the model."""
    return config._attn_implementation == NAME and options_of_config(config).compact


def _rotate_unless_compact(forward: Any, self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The forward of a rotary module: rotates nothing where the tree will."""
    if not has_compact_positions(self.config):
        return forward(self, x, position_ids)
    ones = x.new_ones(*position_ids.shape, 2 * self.inv_freq.shape[0])
    return ones, torch.zeros_like(ones)


@functools.lru_cache
def _computed_rotation(
    kind: str, head_dim: int, max_positions: int, parameters: tuple[tuple[str, Any], ...]
) -> tuple[tuple[float, ...], float]:
    """(frequencies, factor of cos and sin) as the rotary module of a model computes them when it is made."""
    with _disable_current_modes(), torch.device("cpu"):  # real numbers, also while a graph is exported
        config = LlamaConfig(
            head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=dict(parameters)
        )
        inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config)
        return tuple(inv_freq.tolist()), float(factor)


@constant_in_traces
def _scaled_rotation(*arguments: Any) -> tuple[tuple[float, ...], float]:
    """:func:`_computed_rotation`, of which a compiled model keeps the numbers."""
    return _computed_rotation(*arguments)


def _compact_options(module: nn.Module, scaling: float | None) -> dict[str, Any]:
    """The scale and the rotation of a model whose positions the tree shall rotate."""
    if not isinstance(module, tuple(ROTARY)):
        known = ", ".join(kind.__name__ for kind in ROTARY)
        _refuse(
            f"positions='compact' is not supported for {type(module).__name__}, only for {known}: use positions='own'"
        )
    config: Any = module.config
    rope: Any = config.rope_parameters
    kind, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor") or 1.0
    if kind not in ("default", *SCALED):
        _refuse(
            f"positions='compact' needs frequencies that do not follow the sequence length, of rope_type default, "
            f"{', '.join(SCALED)}, got {kind!r}: use positions='own'"
        )
    if part != 1.0 and kind != "proportional":
        _refuse(
            f"positions='compact' rotates whole heads, got partial_rotary_factor {part} with rope_type {kind!r}: use "
            "positions='own'"
        )
    if kind == "default":
        return {"scale": scaling, "rope_base": float(rope["rope_theta"])}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = tuple((name, x) for name, x in rope.items() if isinstance(x, (str, int, float)))
    inv_freq, factor = _scaled_rotation(kind, head_dim, config.max_position_embeddings, parameters)
    # The model multiplies both rotated queries and rotated keys by the factor.
    scale = (head_dim**-0.5 if scaling is None else scaling) * factor**2
    # Dynamo cannot guard what it took for constant, and needs no guard for a tuple that is made here.
    return {"scale": scale, "inv_freq": tuple(float(x) for x in inv_freq)}


# ---- masks


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: PretrainedConfig | None = None,
    **_: Any,
) -> Tensor | None:
    """What transformers hands to :func:`attention` as its mask; the interface of ``AttentionMaskInterface``.

    Returns:
        None for causal attention over whole sequences; bool [B, T], False at padding; or int64 [B, T] for packed
        documents, each token's position in its document. An empty tensor, which :func:`attention` refuses, for a window
        that no layer of the config has: some models make the masks of all kinds of layers.

    Raises:
        NotImplementedError: a mask that is neither causal nor padding, or a cache that does not hold exactly the keys.
        ValueError: attention_mask of another shape.
    """
    if local_size is not None:
        kinds = getattr(config, "layer_types", None)
        if not kinds or not WITHOUT_WINDOW.issuperset(kinds):
            _refuse(REFUSED["sliding_window"])
        return torch.empty(0, device=device)
    name = mask_function.__name__
    if use_vmap or name not in ("causal_mask_function", "and_mask"):
        _refuse(f"only causal attention is supported, this model asks for the mask {name!r}: {ELSEWHERE}")
    if isinstance(q_offset, Tensor) or kv_offset != 0 or q_offset + q_length != kv_length:
        _refuse(
            "a static cache or a mask beyond the keys is not supported: use a TreeCache or a DynamicCache, which "
            "generate() takes by default (cache_implementation=None), and an attention_mask of the keys' length"
        )
    if attention_mask is not None:
        if attention_mask.shape != (batch_size, kv_length):
            raise ValueError(
                f"htree: attention_mask must have shape [{batch_size}, {kv_length}], a row per sequence and a column "
                f"per key, got {list(attention_mask.shape)}"
            )
        return None if not is_tracing(attention_mask) and bool(attention_mask.all()) else attention_mask
    if name == "causal_mask_function":
        return None
    batch = torch.arange(batch_size, device=device)[:, None]
    token = torch.arange(1, q_length, device=device)[None]
    head = torch.zeros_like(batch)
    goes_on = mask_function(batch, head, token, token - 1).expand(batch_size, -1)
    # Packing wraps what the model asks for, such as images whose tokens see each other, in a mask of the same name.
    sees_later = mask_function(batch, head, token - 1, token).expand(batch_size, -1)
    if not is_tracing(sees_later) and bool(sees_later.any()):
        _refuse(
            f"only causal attention is supported, this model shows later tokens to earlier ones: {ELSEWHERE}"
        )
    starts = nn.functional.pad(sees_later | ~goes_on, (1, 0), value=True)
    token = torch.arange(q_length, device=device)
    return token - torch.where(starts, token, 0).cummax(1).values


# ---- attention


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | HandedOver,
    value: Tensor | HandedOver,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Tree attention of one layer of a model; the interface of ``AttentionInterface``.

    Args:
        module: the layer, with ``config``.
        query: [B, H, T_q, K]; key: [B, H_kv, T, K]; value: [B, H_kv, T, V]; rotated, but for compact positions. What a
            :class:`TreeCache` hands over in their place holds the T_q new tokens.
        attention_mask: of :func:`mask`.
        position_ids: [B or 1, T_q]; where they start again among real tokens, documents are packed.
        cu_seq_lens_q, cu_seq_lens_k: boundaries of packed documents, [number + 1]; B = 1.
        max_length_q, max_length_k: no document is longer; None is the length of the row.

    Returns:
        ([B, T_q, H, V], None)

    Raises:
        NotImplementedError: what tree attention does not compute.
        ValueError, TypeError: of :func:`options_of_config` and :func:`htree_ops.tree_attention`.
    """
    given, compact, packed, index_dim = options_of_config(module.config)  # type: ignore[arg-type]
    _check_call(module, dropout, is_causal, rest)
    of_model = _compact_options(module, scaling) if compact else {"scale": scaling, "rope_base": None}
    options = tree_options("config.htree", None, given | of_model)
    by_index = not is_fitting() and index.chooses_by_index(module, index_dim, query.shape[3], options)
    tree = TreeOf("htree", options, module, by_index)
    q, mask, positions = query.transpose(1, 2), attention_mask, position_ids
    if positions is not None and (positions.dim() != 2 or positions.shape[1] != q.shape[1]):
        positions = None
    if isinstance(key, HandedOver):
        return _attend_from_a_tree_cache(q, key, mask, positions, cu_seq_lens_q, tree), None
    assert isinstance(value, Tensor)
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        bounds = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        return _attend_bounded(q, k, v, mask, *bounds, tree), None
    leaders = leaders_of(key, options.selection_stride)
    return _attend(q, k, v, mask, positions, tree, packed, leaders), None


def _check_call(module: nn.Module, dropout: float, is_causal: bool | None, rest: Mapping[str, Any]) -> None:
    """Refuses what a model wants of attention and does not get."""
    if dropout:
        _refuse(
            f"dropout of attention is not supported, got {dropout}: call model.eval(), or make the model with a config "
            "without it (attention_dropout = 0.0, attn_pdrop of GPT-2)"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        _refuse(
            f"{type(module).__name__} must say whether its attention is causal, in is_causal: {ELSEWHERE}"
        )
    if not is_causal:
        _refuse(
            "attention that is not causal, such as that of an encoder or to another sequence, is not supported: "
            f"{ELSEWHERE}"
        )
    if rest.get("output_attentions", getattr(module.config, "output_attentions", False)):
        _refuse("there are no weights to return: use output_attentions=False or attn_implementation='eager'")
    for name, thing in rest.items():
        if thing is not None and name in REFUSED:
            _refuse(REFUSED[name])
        if isinstance(thing, Tensor) and name not in HARMLESS:
            _refuse(
                f"the model passes {name!r} to its attention, which htree does not know: leave it out of the call, or "
                "use attn_implementation='eager' if attention depends on it"
            )


def _check_mask(attention_mask: Tensor) -> None:
    if attention_mask.dim() != 2 or attention_mask.is_floating_point():
        _refuse(
            f"attention_mask must be a mask of padding [B, T], got {attention_mask.dtype} "
            f"{tuple(attention_mask.shape)}: other masks need attn_implementation='sdpa'"
        )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    tree: TreeOf,
    packed: bool,
    leaders: LeaderLayer | None,
) -> Tensor:
    """Whole sequences, padded ones and documents that positions show."""
    if q.shape[1] != k.shape[1]:
        return _attend_behind_a_cache(q, k, v, mask, positions, tree, leaders)
    if leaders is not None:
        leaders.keep(q, mask if mask is not None and mask.dtype == torch.bool and mask.dim() == 2 else None)
    if mask is None:
        mask = positions
    if mask is None:
        return tree.sequences(q, k, v)
    _check_mask(mask)
    real = mask if mask.dtype == torch.bool else None
    if real is None:  # of documents that transformers has packed, or of the call
        positions = mask
    if positions is not None and torch.compiler.is_compiling():
        if packed:
            return attend_restarting(q, k, v, positions, real, tree)
        q = _nan_where_packed(q, positions, real)
    elif positions is not None and has_restarts(positions, real):
        return attend_read_documents(q, k, v, positions, real, tree)
    if real is None:
        return tree.sequences(q, k, v)
    if tree.options.importance == "lse":
        # Its lists depend on what stands behind a row, padding too: each sequence needs a call of its own length.
        return attend_cached(q, k, v, real, real, tree)
    return attend_padded(q, k, v, real, tree)


def _attend_from_a_tree_cache(
    q: Tensor,
    new: HandedOver,
    mask: Tensor | None,
    positions: Tensor | None,
    bounds: Tensor | None,
    tree: TreeOf,
) -> Tensor:
    """The new tokens go into the cache, and their rows come from it."""
    k, v = new.key.transpose(1, 2), new.value.transpose(1, 2)
    if bounds is not None:
        _refuse(PACKED_AND_CACHED)
    if mask is not None:
        _check_mask(mask)
        mask = mask.bool()
    q = _without_documents(q, positions, mask, new.layer.columns)
    return new.layer.attend(q, k, v, mask, tree)


def _attend_behind_a_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    positions: Tensor | None,
    tree: TreeOf,
    leaders: LeaderLayer | None,
) -> Tensor:
    """Queries that are the last rows: the tree of all keys is built again."""
    stride = tree.options.selection_stride
    if stride != 1 and leaders is None:
        _refuse(
            f"queries behind a cache with selection_stride = {stride} need one that keeps those of leaders: use "
            f"{CACHE}=TreeCache(model.config, max_cache_len=...), or {CACHE}=DynamicCache(config=model.config), made "
            "after register() and with this stride, or use_cache=False, as for a model that changes the cache's keys"
        )
    if real is not None and (real.dtype != torch.bool or real.dim() != 2):
        _refuse("behind a cache only padding may be masked: other masks need attn_implementation='sdpa'")
    q = _without_documents(q, positions, real, k.shape[1] - q.shape[1])
    if leaders is not None:
        leaders.keep(q, real)
        return leaders.attend(q, k, v, real, tree)
    if real is None:
        return tree.sequences(q, k, v)
    return attend_cached(q, k, v, real[:, -q.shape[1] :], real, tree)


@validate_arguments_as(
    "htree",
    cu_seq_q="cu_seq_lens_q",
    cu_seq_k="cu_seq_lens_k",
    max_q="max_length_q",
    max_k="max_length_k",
)
def _attend_bounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    max_length_q: int | None,
    max_length_k: int | None,
    tree: TreeOf,
) -> Tensor:
    """Documents between boundaries of queries and of keys, in one row."""
    if q.shape[0] != 1:
        _refuse(f"packed documents (cu_seq_lens_q) need a batch of 1, got {q.shape[0]}")
    if cu_seq_lens_q is None:
        _refuse("packed documents need cu_seq_lens_q beside cu_seq_lens_k")
    if cu_seq_lens_k is None:
        if q.shape[1] != k.shape[1]:
            _refuse("packed documents behind a cache need cu_seq_lens_k beside cu_seq_lens_q")
        cu_seq_lens_k = cu_seq_lens_q
    if mask is not None and mask.dtype != torch.int64:  # not one that restarting positions have made
        _refuse("packed documents (cu_seq_lens_q) must have no attention_mask: leave padding out of them")
    # tree_attention_varlen checks the same, in words that validate_arguments_as leaves as they are.
    bounds = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
    check_tensors("htree", query=(q, "B T H K"), **{name: (x, "documents+1") for name, x in bounds.items()})
    check_dtype("htree", (torch.int32,), **bounds)
    longest = (max_length_q or q.shape[1], max_length_k or k.shape[1])
    return tree.documents(q[0], k[0], v[0], cu_seq_lens_q, cu_seq_lens_k, *longest)[None]


def _without_documents(q: Tensor, positions: Tensor | None, real: Tensor | None, before: int) -> Tensor:
    """The queries of a call with ``before`` tokens in a cache, which cannot tell documents apart later."""
    if positions is None or q.shape[1] == 1:  # a step never waits for the device
        return q
    if torch.compiler.is_compiling():
        return _nan_where_packed(q, positions, real, before, PACKED_AND_CACHED)
    if has_restarts(positions, real, before):
        _refuse(PACKED_AND_CACHED)
    return q


def _nan_where_packed(
    q: Tensor,
    positions: Tensor,
    real: Tensor | None = None,
    before: int = 0,
    message: str = PACKED_AND_COMPILED,
) -> Tensor:
    """While torch compiles, what positions hold is not known. Documents must not attend to each other in silence."""
    several = restarts(positions, real, before).any(1)
    if not q.is_cuda:
        torch._assert_async(~several.any(), f"htree: {message}")
    return q.masked_fill(several[:, None, None, None], torch.nan)
