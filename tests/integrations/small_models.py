"""Small random models of transformers, in the exact regime: sequences no longer than max_top_nodes."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from htree_ops.integrations.transformers import register

register()
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXACT = {"compression_rate": 4, "top_k": 16, "max_top_nodes": 64}
SPARSE = {"compression_rate": 4, "top_k": 2, "max_top_nodes": 8}


def make_model(
    kind: str = "llama",
    options: dict[str, Any] | None = None,
    attention: str = "htree",
    device: str = "cpu",
    **changes: Any,
) -> PreTrainedModel:
    """The same weights for the same ``kind`` and sizes."""
    config_class, model_class, extra = MODELS[kind]
    config = config_class(**{**SIZES, **extra, **changes}, htree=dict(EXACT if options is None else options))
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=attention)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)  # of the usual 0.02 attention would be nearly uniform
    return model.to(device).eval()


def make_other(
    config: str, model: str, sizes: dict[str, Any], attention: Any = "htree", options: Any = EXACT
) -> PreTrainedModel:
    """The same weights for the same family."""
    made = getattr(transformers, config)(**sizes, htree=dict(options))
    torch.manual_seed(0)
    found = getattr(transformers, model)._from_config(made, attn_implementation=attention)
    torch.manual_seed(1)
    for p in found.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return found.eval()


def make_ids(batch: int = 2, length: int = 40, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, SIZES["vocab_size"], (batch, length), generator=generator).to(device)


def logits_and_gradients(model: Any, ids: Tensor, **call: Any) -> tuple[Tensor, list[Tensor]]:
    """Logits of the real tokens, and the gradients of the mean of their squares."""
    model.zero_grad()
    out = model(ids, use_cache=False, **call).logits
    mask = call.get("attention_mask")
    out = out if mask is None else out[mask.bool()]
    out.square().mean().backward()
    used = [p for p in model.parameters() if p.requires_grad]
    return out.detach(), [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in used]


def assert_near(found: Sequence[Tensor], wanted: Sequence[Tensor], least: float = 1e-6) -> None:
    """Each by its own norm."""
    for got, want in zip(found, wanted, strict=True):
        assert bool((got - want).norm() <= 1e-4 * want.norm() + least)


def assert_threads_agree(call: Callable[[int], Tensor], times: int) -> None:
    """Two threads at once, each with a call of its own, get what one gets."""
    wanted = [call(i) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for i, found in enumerate(pool.map(lambda i: [call(i) for _ in range(times)], range(2))):
            assert all(torch.equal(out, wanted[i]) for out in found)


def padded_mask(ids: Tensor, columns: int = 9) -> Tensor:
    """Of a batch whose first sequence has padding on its left."""
    mask = torch.ones_like(ids)
    mask[0, :columns] = 0
    return mask
