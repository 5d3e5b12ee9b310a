"""Models of other families: equal to their own eager attention where they fit, and else refused in one line."""

from typing import Any

import pytest
import torch
import transformers
from small_models import (
    EXACT,
    SIZES,
    SPARSE,
    assert_near,
    logits_and_gradients,
    make_ids,
    make_model,
    make_other,
)
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

from htree_ops.integrations import patch_model_, unpatch_model_
from htree_ops.integrations.cache import CACHE
from htree_ops.integrations.transformers import TreeCache, attention

FULL = {"layer_types": ["full_attention"] * 2}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
#: Config, model and sizes of families whose attention is causal, beside those of test_peers.py.
CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phi3, partly rotated": ("Phi3Config", "Phi3ForCausalLM", {**SIZES, "partial_rotary_factor": 0.5}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES),
    "gemma2 without soft cap": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**SIZES, **FULL, "query_pre_attn_scalar": 16, "attn_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**SIZES, **FULL}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "qwen2-moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**SIZES, **FULL, **EXPERTS, **SHARED}),
    "deepseek": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {name: size for name, size in SIZES.items() if name != "head_dim"} | LATENT,
    ),
}
GAPS: dict[str, dict[str, Any]] = {
    "left padding": {"attention_mask": [[0] * 11 + [1] * 29, [1] * 40]},
    "documents": {"position_ids": [[*range(13), *range(20), *range(7)], [*range(40)]]},
}


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("family", CAUSAL)
def test_causal_families_equal_their_own_attention(family, gaps):
    call = {name: torch.tensor(value) for name, value in GAPS[gaps].items()}
    (out, gradients), (wanted, of_eager) = (
        logits_and_gradients(make_other(*CAUSAL[family], attention=name), make_ids(), **call)
        for name in ("htree", "eager")
    )
    assert_near([out, *gradients], [wanted, *of_eager], least=1e-5)


OPT = {"vocab_size": 61, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_documents_are_kept_apart_where_the_models_own_mask_does_not_do_it():
    """OPT makes its mask without positions, any model does so with a cache: restarting positions are enough."""
    ids = make_ids(1, 24)
    positions = torch.cat([torch.arange(13), torch.arange(11)])[None]
    opt = make_other("OPTConfig", "OPTForCausalLM", {**OPT, "word_embed_proj_dim": 32})
    for model, use_cache in ((opt, False), (make_model(), True)):
        packed = model(ids, position_ids=positions, use_cache=use_cache).logits
        alone = [
            model(part, position_ids=torch.arange(part.shape[1])[None]).logits
            for part in ids.split((13, 11), 1)
        ]
        torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("importance", ["lse_causal", "lse"])
def test_documents_in_a_padded_batch(importance, device):
    """Real tokens that start again are a document; positions of padding, 1 in generate(), say nothing."""
    model, ids = (
        make_model(options=SPARSE | {"importance": importance}, device=device),
        make_ids(device=device),
    )
    column = torch.arange(40, device=device)
    positions = torch.stack((column % 17, (column - 9).clamp(min=0) % 17))
    mask = torch.ones_like(ids)
    mask[1, :9], positions[1, :9] = 0, 1
    mask[1, 26:28], positions[1, 28:] = 0, column[:12]
    packed = model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    for row, lengths in enumerate(((17, 17, 6), (17, 12))):
        real = mask[row].bool()
        alone = [model(part[None], use_cache=False).logits[0] for part in ids[row][real].split(lengths)]
        torch.testing.assert_close(packed[row][real], torch.cat(alone), rtol=1e-4, atol=1e-4)


JUMPS = {"gap": [*range(20), *range(25, 45)], "twice": [*range(20), *range(19, 39)]}


@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("call", ["cache", "no cache", "ones", "padding"])
def test_positions_that_jump_count_as_in_the_models_own_attention(jump, call):
    ids, keywords = make_ids(), {"position_ids": torch.tensor([JUMPS[jump]]), "use_cache": call == "cache"}
    if call in ("ones", "padding"):
        keywords["attention_mask"] = torch.ones_like(ids)
        keywords["attention_mask"][0, : 3 * (call == "padding")] = 0
    ours, theirs = (make_model(attention=name)(ids, **keywords).logits for name in ("htree", "eager"))
    torch.testing.assert_close(ours[:, 3:], theirs[:, 3:], rtol=1e-4, atol=1e-4)


# ---- refusals

WINDOW = "a window of attention.*make each of config.layer_types 'full_attention'"
NO_INTERFACE = "does not use the attention interface of transformers: leave attn_implementation out"
NOT_CAUSAL = "only causal attention is supported|attention that is not causal"
SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = {**SMALL, "intermediate_size": 48}
VISION = {**{name: size for name, size in ENCODER.items() if name != "vocab_size"}, "image_size": 32}
PATCHES = {**VISION, "patch_size": 8}
SEQ2SEQ = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
OSS = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA4 = {**SIZES, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 16}
MLLAMA = {**SIZES, "cross_attention_layers": [1]}
IMAGE = torch.zeros(1, 3, 32, 32)
IDS = make_ids(1, 24)
#: Config, model, sizes, a call, and what is said.
REFUSED: dict[str, tuple[str, str, dict[str, Any], dict[str, Tensor], str]] = {
    "bloom": ("BloomConfig", "BloomForCausalLM", {"vocab_size": 61, "hidden_size": 32}, {}, NO_INTERFACE),
    "xglm": ("XGLMConfig", "XGLMForCausalLM", {"vocab_size": 61, "d_model": 32}, {}, NO_INTERFACE),
    "mpt": ("MptConfig", "MptForCausalLM", {"vocab_size": 61, "d_model": 32}, {}, NO_INTERFACE),
    "falcon": ("FalconConfig", "FalconForCausalLM", SMALL, {}, NO_INTERFACE),
    "gpt-neox-japanese": ("GPTNeoXJapaneseConfig", "GPTNeoXJapaneseForCausalLM", SMALL, {}, NO_INTERFACE),
    "xlnet": ("XLNetConfig", "XLNetLMHeadModel", {"vocab_size": 61, "d_model": 32}, {}, NO_INTERFACE),
    "deberta": ("DebertaV2Config", "DebertaV2ForMaskedLM", ENCODER, {}, NO_INTERFACE),
    "gemma3 with windows": ("Gemma3TextConfig", "Gemma3ForCausalLM", SIZES, {"input_ids": IDS}, WINDOW),
    "llama4 in chunks": ("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4, {"input_ids": IDS}, WINDOW),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**SIZES, **FULL}, {"input_ids": IDS}, "a soft cap"),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {**OSS, **FULL}, {"input_ids": IDS}, "sinks"),
    "vit": ("ViTConfig", "ViTModel", PATCHES, {"pixel_values": IMAGE}, NOT_CAUSAL),
    "clip": ("CLIPVisionConfig", "CLIPVisionModel", PATCHES, {"pixel_values": IMAGE}, NOT_CAUSAL),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", ENCODER, {"input_ids": IDS}, NOT_CAUSAL),
    "bert beside an encoder": (
        "BertConfig",
        "BertLMHeadModel",
        {**ENCODER, "is_decoder": True, "add_cross_attention": True},
        {"input_ids": IDS, "encoder_hidden_states": torch.zeros(1, 9, 32)},
        NOT_CAUSAL,
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        T5,
        {"input_ids": IDS, "decoder_input_ids": IDS},
        NOT_CAUSAL,
    ),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**SEQ2SEQ, "max_source_positions": 50},
        {"input_features": torch.zeros(1, 80, 100), "decoder_input_ids": IDS},
        NOT_CAUSAL,
    ),
    "mllama beside an image": (
        "MllamaTextConfig",
        "MllamaForCausalLM",
        MLLAMA,
        {"input_ids": IDS, "cross_attention_states": torch.zeros(1, 24, 32)},
        "MllamaTextCrossAttention must say whether its attention is causal, in is_causal",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_in_one_line(family):
    config, model, sizes, call, message = REFUSED[family]
    with pytest.raises(NotImplementedError, match=f"htree: .*({message})") as caught:
        make_other(config, model, sizes)(**call)
    assert "\n" not in str(caught.value)


def test_a_model_without_the_interface_is_not_patched():
    """transformers itself would warn and go on with the attention that the model has."""
    model = make_other("BloomConfig", "BloomForCausalLM", {"vocab_size": 61, "hidden_size": 32}, "eager")
    with pytest.raises(NotImplementedError, match=f"BloomForCausalLM {NO_INTERFACE}"):
        patch_model_(model)
    assert model.config._attn_implementation == "eager"


# ---- parts of a model


def make_llava(attention: Any) -> PreTrainedModel:
    text = {**SIZES, "model_type": "llama", "htree": EXACT}
    vision = {**PATCHES, "model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=60)
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration._from_config(
        config, attn_implementation=attention
    ).eval()


def test_the_language_model_of_a_model_with_several_parts():
    ids = torch.cat([make_ids(1, 4).clamp(max=59), torch.full((1, 16), 60), make_ids(1, 5).clamp(max=59)], 1)
    call = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32)}
    parts = {"text_config": "htree", "vision_config": "eager"}
    ours, theirs = make_llava(parts), make_llava("eager")
    torch.testing.assert_close(ours(**call).logits, theirs(**call).logits)
    with pytest.raises(
        NotImplementedError, match=r"not causal.*\{'text_config': 'htree'\} for the language model"
    ):
        make_llava("htree")(**call)


def test_every_part_gets_its_attention_back():
    parts = {"text_config": "eager", "vision_config": "sdpa"}
    model = make_llava({"": "sdpa", **parts})
    patch_model_(model)
    assert model.config.text_config._attn_implementation == "htree"
    unpatch_model_(model)
    assert {name: getattr(model.config, name)._attn_implementation for name in parts} == parts
    assert model.config._attn_implementation == "sdpa"


# ---- masks and documents


def test_documents_with_images_that_see_each_other_are_refused():
    """Packing wraps the mask of the images: its name is then that of packed causal attention."""
    layer = make_model().model.layers[0].self_attn
    x, q, k = torch.zeros(1, 12, 32), torch.randn(1, 4, 12, 8), torch.randn(1, 2, 12, 8)
    positions = torch.arange(12)[None]
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1, -1, 1, 1, 1, -1, -1]])

    def attend(positions, blocks):
        call = {"position_ids": positions, "block_sequence_ids": blocks}
        return attention(layer, q, k, k, create_causal_mask(layer.config, x, None, None, **call))[0]

    assert attend(positions % 6, None).shape == (1, 12, 4, 8)
    with pytest.raises(NotImplementedError, match="this model shows later tokens to earlier ones"):
        attend(positions % 6, blocks)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(positions, None), attend(positions, None))
    with pytest.raises(RuntimeError, match="htree: a compiled model does not look"):
        compiled(positions, blocks)


BOUNDS = torch.tensor([0, 20, 40], dtype=torch.int32)
PADDED = torch.tensor([[0] * 9 + [1] * 31])
SQUARE = torch.ones(1, 1, 40, 40, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"cu_seq_lens_q": BOUNDS, "attention_mask": PADDED}, "must have no attention_mask"),
        ({"cu_seq_lens_q": BOUNDS, "attention_mask": SQUARE}, "must have no attention_mask"),
        ({"cu_seq_lens_k": BOUNDS}, "need cu_seq_lens_q beside cu_seq_lens_k"),
    ],
    ids=["padding", "square", "keys alone"],
)
def test_what_boundaries_would_hide_is_refused(call, message):
    with pytest.raises(NotImplementedError, match=f"htree: packed documents .*{message}"):
        make_model()(make_ids(1), use_cache=False, **call)


def test_boundaries_behind_a_cache_name_the_keys():
    layer = make_model(options=SPARSE).model.layers[0].self_attn
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 46, 8)
    bounds_q, bounds_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 2, 6), (0, 20, 46)))
    with pytest.raises(NotImplementedError, match="behind a cache need cu_seq_lens_k"):
        attention(layer, q, k, k, None, cu_seq_lens_q=bounds_q)
    out, _ = attention(layer, q, k, k, None, cu_seq_lens_q=bounds_q, cu_seq_lens_k=bounds_k)
    last, _ = attention(layer, q[:, :, 2:], k[:, :, 20:], k[:, :, 20:], None)
    torch.testing.assert_close(out[:, 2:], last)


def test_weights_that_the_config_asks_for_are_refused():
    with pytest.raises(NotImplementedError, match="there are no weights to return"):
        make_model(output_attentions=True)(make_ids())


# ---- caches


def test_a_tree_cache_is_for_layers_of_full_attention():
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    config = transformers.Qwen3NextConfig(**{**SIZES, **EXPERTS, **SHARED, **kinds})
    with pytest.raises(NotImplementedError, match="this config has linear_attention too: use a DynamicCache"):
        TreeCache(config, max_cache_len=64)
    assert len(TreeCache(transformers.Qwen2Config(**SIZES), max_cache_len=64).layers) == 2


def test_a_model_that_changes_what_its_cache_returns_is_refused():
    model = make_other("DiffLlamaConfig", "DiffLlamaForCausalLM", SIZES)
    with pytest.raises(NotImplementedError, match="hands what its cache returns to its attention unchanged"):
        model(make_ids(), **{CACHE: TreeCache(model.config, max_cache_len=64)})
    for function in (torch.cat, nn.functional.dropout):
        with pytest.raises(NotImplementedError, match="use a DynamicCache"):
            function(TreeCache(model.config, 64).update(IDS, IDS, 0)[0])
