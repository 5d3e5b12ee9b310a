"""MiniMax-M3 of transformers, whose indexer chooses blocks, on sparse_attention: equal to its own eager attention."""

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.minimax_m3_vl", reason="this transformers has no MiniMax-M3")

from htree_ops.integrations.block_lists import NAME, attention, register_block_lists  # noqa: E402

BLOCK = 8


def make_model(device: str, block: int = BLOCK, heads: int = 4) -> Any:
    """Three layers, one of them dense, with random weights; 3 blocks of a sequence are read."""
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    register_block_lists()
    torch.manual_seed(0)
    config = MiniMaxM3VLTextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=24,
        dense_intermediate_size=40,
        shared_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=16,
        rotary_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=block,
        index_topk_blocks=3,
        index_local_blocks=1,
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "dense", "sparse"],
        bos_token_id=1,
        eos_token_id=2,
    )
    return MiniMaxM3VLForCausalLM(config).to(device).eval()


def tokens_of(device: str, T: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(T)
    return torch.randint(3, 61, (2, T), generator=generator, device="cpu").to(device)


def run(model: Any, implementation: str, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of all weights that have one."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(tokens, use_cache=False).logits
    (
        logits.float().log_softmax(-1)[..., 7] * torch.linspace(-1, 1, tokens.shape[1], device=tokens.device)
    ).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("T", [1, BLOCK, 5 * BLOCK + 3, 12 * BLOCK])
def test_equal_to_eager_forward_and_backward(T, device):
    block = BLOCK if device == "cpu" else 16
    model, tokens = make_model(device, block), tokens_of(device, T)
    wanted, wanted_gradients = run(model, "eager", tokens)
    found, gradients = run(model, NAME, tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert set(gradients) == set(wanted_gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, wanted_gradients[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_what_is_not_chosen_is_not_read(device):
    """With 12 blocks, of which 3 are read, the result differs from that of a model that reads all."""
    block = BLOCK if device == "cpu" else 16
    model, tokens = make_model(device, block), tokens_of(device, 12 * block)
    sparse, _ = run(model, NAME, tokens)
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.topk_blocks = 12
    whole, _ = run(model, NAME, tokens)
    assert not torch.allclose(sparse[:, -1], whole[:, -1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sparse[:, : 3 * block], whole[:, : 3 * block], rtol=1e-4, atol=1e-4)


def test_generate_with_a_cache(device):
    model, tokens = make_model(device, BLOCK if device == "cpu" else 16), tokens_of(device, 3 * BLOCK)
    results = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        results.append(model.generate(tokens, max_new_tokens=2 * BLOCK, do_sample=False))
    assert torch.equal(*results)


def test_refusals(device):
    model, tokens = make_model(device, 16), tokens_of(device, 24)
    model.set_attn_implementation(NAME)
    padding = torch.ones_like(tokens)
    padding[0, :3] = 0
    with pytest.raises(
        NotImplementedError, match="htree_blocks: padding and packed documents are not supported"
    ):
        model(tokens, attention_mask=padding)
    q = torch.zeros(1, 2, 4, 8, device=device)
    with pytest.raises(
        NotImplementedError, match=r"htree_blocks: dropout of attention is not supported, got 0.5"
    ):
        attention(model, q, q, q, None, dropout=0.5)


@pytest.mark.parametrize("T_q", [1, 3, 8])
def test_dense_layers_take_suffixes(T_q, device):
    q, k, v = (torch.randn(1, h, t, 8, device=device) for h, t in ((4, T_q), (2, 8), (2, 8)))
    out, _ = attention(torch.nn.Identity(), q, k, v, None)
    whole, _ = attention(torch.nn.Identity(), torch.cat([q.new_zeros(1, 4, 8 - T_q, 8), q], 2), k, v, None)
    torch.testing.assert_close(out, whole[:, -T_q:])
