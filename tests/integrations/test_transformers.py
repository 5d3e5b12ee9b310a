"""attn_implementation="htree": exact regimes equal the model's own attention, and the rest is refused."""

import subprocess
import sys
from inspect import signature
from typing import Any

import pytest
import torch
from small_models import (
    EXACT,
    MODELS,
    SPARSE,
    assert_near,
    assert_threads_agree,
    logits_and_gradients,
    make_ids,
    make_model,
    padded_mask,
)
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    DataCollatorWithFlattening,
    StaticCache,
    Trainer,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import TransformersKwargs

import htree_ops
from htree_ops.integrations.cache import CACHE, TreeCache
from htree_ops.integrations.transformers import _compact_options, _computed_rotation, attention, register


def assert_equal_models(ours: Any, theirs: Any, ids: Tensor, **call: Any) -> None:
    out, gradients = logits_and_gradients(ours, ids, **call)
    expected, wanted = logits_and_gradients(theirs, ids, **call)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert_near(gradients, wanted)


# ---- exact regimes

BATCHES: dict[str, dict[str, Any]] = {
    "whole": {},
    "left padding": {"attention_mask": [[0] * 11 + [1] * 29, [1] * 40]},
    "right padding": {"attention_mask": [[1] * 29 + [0] * 11, [1] * 40]},
    "padding alone": {"attention_mask": [[0] * 40, [0] * 39 + [1]]},
    "all real": {"attention_mask": [[1] * 40] * 2},
    "documents": {"position_ids": [[*range(13), *range(20), *range(7)], [*range(40)]]},
    "documents in every row": {"position_ids": [[*range(1), *range(38), *range(1)]]},
}


@pytest.mark.parametrize("positions", ["own", "compact"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", MODELS)
def test_exact_regimes_equal_the_models_own_attention(kind, batch, positions, device):
    ours = make_model(kind, EXACT | {"positions": positions}, device=device)
    theirs = make_model(kind, attention="eager", device=device)
    call = {name: torch.tensor(value, device=device) for name, value in BATCHES[batch].items()}
    assert_equal_models(ours, theirs, make_ids(device=device), **call)


@pytest.mark.parametrize("positions", ["own", "compact"])
def test_documents_between_boundaries(positions, device):
    """What DataCollatorWithFlattening makes: one row, restarting positions, boundaries."""
    sequences = [make_ids(1, n)[0].tolist() for n in (13, 1, 26)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": ids} for ids in sequences])
    batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
    batch.pop("labels")
    ours = make_model(options=SPARSE | {"positions": positions}, device=device)
    packed = ours(**batch, use_cache=False).logits[0]
    alone = [ours(torch.tensor([ids], device=device), use_cache=False).logits[0] for ids in sequences]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-4)
    del batch["cu_seq_lens_q"], batch["cu_seq_lens_k"], batch["max_length_q"], batch["max_length_k"]
    torch.testing.assert_close(ours(**batch, use_cache=False).logits[0], packed)


@pytest.mark.parametrize("side", ["left", "right"])
def test_beyond_the_exact_regime_padding_changes_nothing(side, device):
    """Logits and gradients of padded sequences are those of the sequences alone, and NaN of padding stays there."""
    model = make_model(options=SPARSE, device=device)
    ids = make_ids(1, 33, device)
    out, gradients = logits_and_gradients(model, ids)
    pad = torch.full((1, 9), 5, device=device)
    parts = (pad, ids) if side == "left" else (ids, pad)
    mask = torch.cat([torch.full_like(x, x is ids) for x in parts], 1)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    both = logits_and_gradients(model, torch.cat(parts, 1), attention_mask=mask, position_ids=position_ids)
    torch.testing.assert_close(both[0], out[0], rtol=1e-4, atol=1e-4)
    assert_near(both[1], gradients)

    embeddings = model.get_input_embeddings()(torch.cat(parts, 1)).detach()
    embeddings[mask == 0] = torch.nan
    broken = model(inputs_embeds=embeddings, attention_mask=mask, position_ids=position_ids).logits
    torch.testing.assert_close(broken[mask.bool()], out[0], rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing_where_later_tokens_count(device):
    """importance="lse" is not causal: what stands behind a row is in its lists."""
    layer = make_model(options=SPARSE | {"importance": "lse"}, device=device).model.layers[0].self_attn
    real = torch.tensor([[False] * 2 + [True] * 33 + [False] * 3], device=device)

    def attend(seed, mask):
        torch.manual_seed(seed)
        q, k, v = (3 * torch.randn(1, heads, 33, 8, device=device) for heads in (4, 1, 1))
        if mask is not None:
            q, k, v = (torch.nn.functional.pad(x, (0, 0, 2, 3), value=torch.nan) for x in (q, k, v))
        return attention(layer, q, k, v, mask)[0]

    for seed in range(20):
        out = attend(seed, real)
        torch.testing.assert_close(out[real], attend(seed, None)[0], rtol=1e-4, atol=1e-4)
        assert not out[~real].any()
    compiled = torch.compile(lambda q: attention(layer, q, q, q, real)[0], backend="eager", fullgraph=True)
    q = torch.randn(1, 4, 38, 8, device=device)
    torch.testing.assert_close(compiled(q), attention(layer, q, q, q, real)[0])


def test_compact_positions_are_those_of_tree_attention(device):
    """The layer's own queries and keys, unrotated, through the function with its own rotation."""
    model = make_model(options=SPARSE | {"positions": "compact"}, num_hidden_layers=1, device=device)
    layer, ids = model.model.layers[0], make_ids(device=device)
    x = layer.input_layernorm(model.model.embed_tokens(ids))
    q, k, v = (
        p(x).unflatten(-1, (-1, 8))
        for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    )
    base = model.config.rope_parameters["rope_theta"]
    found = []
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model(ids, use_cache=False)
    wanted = htree_ops.tree_attention(q, k, v, **SPARSE, rope_base=base)
    torch.testing.assert_close(found[0], wanted.flatten(2))
    own = make_model(options=SPARSE, num_hidden_layers=1, device=device)
    assert not torch.allclose(own(ids).logits, model(ids).logits, atol=1e-3)
    model.set_attn_implementation("eager")  # another implementation finds the rotary module as it was
    torch.testing.assert_close(
        model(ids).logits, make_model(attention="eager", num_hidden_layers=1, device=device)(ids).logits
    )


#: Rotary positions whose frequencies are not those of rope_theta, at 512 positions.
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "rope_theta": 500.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128},
    "yarn with a factor of its own": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.6,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100.0},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scaling", SCALED)
def test_compact_positions_have_the_frequencies_of_the_model(scaling, kind, batch, device):
    rope = {"rope_parameters": SCALED[scaling]}
    ours = make_model(kind, EXACT | {"positions": "compact"}, device=device, **rope)
    theirs = make_model(kind, attention="eager", device=device, **rope)
    call = {name: torch.tensor(value, device=device) for name, value in BATCHES[batch].items()}
    assert_equal_models(ours, theirs, make_ids(device=device), **call)
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": SCALED[scaling]["rope_theta"]}}
    other = make_model(kind, attention="eager", device=device, **plain)
    ids = make_ids(device=device)
    assert not torch.allclose(other(ids).logits, theirs(ids).logits, atol=1e-3)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scaling", SCALED)
def test_the_rotation_is_that_of_the_rotary_module(scaling, kind):
    model = make_model(
        kind, SPARSE | {"positions": "compact"}, num_hidden_layers=1, rope_parameters=SCALED[scaling]
    )
    rotary, layer = model.model.rotary_emb, model.model.layers[0].self_attn
    found = _compact_options(layer, layer.scaling)
    assert found["inv_freq"] == tuple(rotary.inv_freq.tolist())
    assert found["scale"] == pytest.approx(layer.scaling * rotary.attention_scaling**2)
    assert _compact_options(layer, None)["scale"] == pytest.approx(8**-0.5 * rotary.attention_scaling**2)


def test_scaled_positions_are_compiled_exported_and_served():
    torch._dynamo.reset()
    options = SPARSE | {"positions": "compact"}
    model = make_model(options=options, num_hidden_layers=1, rope_parameters=SCALED["yarn"])
    ids = make_ids()
    _computed_rotation.cache_clear()
    with torch.no_grad():
        exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got, wanted = (logits_and_gradients(m, ids) for m in (compiled, model))
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(exported.module()(ids, use_cache=False).logits, model(ids).logits)
    cache = TreeCache(model.config, max_cache_len=40)
    with torch.no_grad():
        parts = [model(part, **{CACHE: cache}).logits for part in ids.split((31, 1, 1, 7), dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=1e-4, atol=1e-4)


# ---- generation and caches


@pytest.mark.parametrize(
    ("kind", "positions"), [("llama", "own"), ("llama", "compact"), ("mistral", "own"), ("qwen3", "compact")]
)
def test_generation_equals_that_of_the_models_own_attention(kind, positions, device):
    ids = make_ids(length=30, device=device)
    mask = padded_mask(ids)
    keywords = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
    ours = make_model(kind, EXACT | {"positions": positions}, device=device)
    theirs = make_model(kind, attention="eager", device=device)
    for call in ({}, {"attention_mask": mask}, {"attention_mask": mask, "num_beams": 2}):
        assert torch.equal(ours.generate(ids, **call, **keywords), theirs.generate(ids, **call, **keywords))


def test_a_padded_prompt_in_chunks_through_the_default_cache(device):
    """The first chunk of a sequence may be padding alone; its positions start in a later one."""
    model, ids = make_model(options=SPARSE, device=device), make_ids(device=device)
    mask = padded_mask(ids)
    call = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(
        model.generate(ids, prefill_chunk_size=7, **call), model.generate(ids, use_cache=False, **call)
    )


# ---- training


def test_a_small_model_learns_the_same_both_ways(device):
    """And beyond the exact regime: what a sequence says again is found through nodes that are opened."""
    losses = {}
    sparse = {"compression_rate": 4, "top_k": 4, "max_top_nodes": 16}
    for name, options in {"eager": EXACT, "htree": EXACT, "sparse": sparse}.items():
        attention = "eager" if name == "eager" else "htree"
        model = make_model(options=options, attention=attention, num_hidden_layers=1, device=device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids = make_ids(4, 16, device).repeat(1, 3)
        losses[name] = []
        for _ in range(25):
            loss = model(ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert losses["eager"] == pytest.approx(losses["htree"], rel=1e-2)
    for curve in losses.values():
        assert curve[-1] < 0.5 * curve[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant, device):
    model, ids = make_model(options=SPARSE, device=device).train(), make_ids(device=device)
    mask = padded_mask(ids)
    for call in ({}, {"attention_mask": mask}, {"position_ids": torch.arange(40, device=device)[None] % 17}):
        model.gradient_checkpointing_disable()
        _, wanted = logits_and_gradients(model, ids, **call)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        _, got = logits_and_gradients(model, ids, **call)
        for ours, theirs in zip(got, wanted, strict=True):
            assert torch.equal(ours, theirs)


class PaddingFree:
    """One row of documents between boundaries, and labels that are already those of the next token."""

    def __init__(self) -> None:
        self.flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = self.flatten(rows)
        batch["shift_labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        return batch


@pytest.mark.parametrize("packed", ["padded", "packed", "padding-free"])
def test_the_trainer_trains(packed, tmp_path):
    def collate(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([[0] * (longest - len(row["input_ids"])) + row["input_ids"] for row in rows])
        return {
            "input_ids": ids,
            "attention_mask": (ids != 0).long(),
            "labels": ids.masked_fill(ids == 0, -100),
        }

    sequences = [{"input_ids": (make_ids(1, 7)[0].tolist() * 6)[: 30 + i % 9]} for i in range(16)]
    model = make_model(options=SPARSE)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=8, learning_rate=5e-3, report_to=[],
        logging_steps=1, save_strategy="no", use_cpu=True, gradient_checkpointing=True, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    collators = {
        "padded": collate,
        "packed": DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        "padding-free": PaddingFree(),
    }
    trainer = Trainer(model=model, args=arguments, train_dataset=sequences, data_collator=collators[packed])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]


def test_threads_do_not_disturb_each_other():
    """Two models with different options and differently padded batches at once."""
    models = [make_model(options=options) for options in (SPARSE, EXACT)]
    ids = make_ids()
    masks = [torch.ones_like(ids), torch.ones_like(ids)]
    masks[0][0, :9], masks[1][1, :20] = 0, 0

    def run(i):
        with torch.no_grad():
            return models[i](ids, attention_mask=masks[i]).logits

    assert_threads_agree(run, 8)


# ---- saving


def test_options_are_saved_with_the_model(tmp_path):
    model, ids = make_model(options=SPARSE | {"positions": "compact"}), make_ids()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="htree")
    assert again.config.htree == SPARSE | {"positions": "compact"}
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_register_gives_the_default_of_positions():
    model, ids = make_model(options=SPARSE), make_ids()
    own = model(ids).logits
    register(positions="compact")
    compact = model(ids).logits
    model.config.htree = SPARSE | {"positions": "compact"}
    register()
    assert torch.equal(model(ids).logits, compact)
    model.config.htree = SPARSE | {"positions": "own"}
    assert torch.equal(model(ids).logits, own)
    assert not torch.allclose(own, compact, atol=1e-3)
    with pytest.raises(ValueError, match="positions must be one of own, compact, got 'long'"):
        register(positions="long")


# ---- refusals


def call_with(changes: dict[str, Any], **call: Any) -> None:
    make_model(**changes)(make_ids(), **call)


def encoder() -> None:
    config = BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
    )
    BertModel._from_config(config, attn_implementation="htree").eval()(make_ids())


def no_dict(given: object = "fast") -> Any:
    layer = make_model().model.layers[0].self_attn
    layer.config.htree = given
    return layer


def behind_a_cache(**call: Any) -> None:
    model = make_model()
    model(make_ids(), **{CACHE: model(make_ids())[CACHE]}, **call)


def packed_with(**call: Any) -> None:
    bounds = torch.tensor([0, 17, 40], dtype=torch.int32)
    make_model()(make_ids(1), use_cache=False, **{"cu_seq_lens_q": bounds} | call)


COMPACT = EXACT | {"positions": "compact"}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
    "factor": 4.0,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
REFUSALS: dict[str, tuple[Any, type[Exception], str]] = {
    "sliding window": (
        lambda: call_with({"kind": "mistral", "sliding_window": 16}),
        NotImplementedError,
        "config.sliding_window = None",
    ),
    "layers with a window": (
        lambda: call_with({"kind": "qwen3", **WINDOWS}),
        NotImplementedError,
        "layer_types",
    ),
    "dropout": (
        lambda: make_model(attention_dropout=0.1).train()(make_ids()),
        NotImplementedError,
        r"dropout .* got 0.1: call model.eval\(\), or make the model with a config without it",
    ),
    "mask of 4 dims": (
        lambda: call_with({}, attention_mask=torch.ones(2, 1, 40, 40, dtype=torch.bool)),
        NotImplementedError,
        r"mask of padding \[B, T\], got torch.bool \(2, 1, 40, 40\)",
    ),
    "static cache": (
        lambda: call_with({}, **{CACHE: StaticCache(config=make_model().config, max_cache_len=64)}),
        NotImplementedError,
        "static cache .* DynamicCache",
    ),
    "static cache of generate": (
        lambda: make_model().generate(make_ids(), max_new_tokens=2, cache_implementation="static"),
        NotImplementedError,
        "static cache",
    ),
    "short mask": (
        lambda: behind_a_cache(attention_mask=torch.ones(2, 40, dtype=torch.long)),
        ValueError,
        r"attention_mask must have shape \[2, 80\], .* a column per key, got \[2, 40\]",
    ),
    "mask of another batch": (
        lambda: call_with({}, attention_mask=torch.ones(3, 40, dtype=torch.long)),
        ValueError,
        r"attention_mask must have shape \[2, 40\], a row per sequence .*, got \[3, 40\]",
    ),
    "mask of 1 dim": (
        lambda: call_with({}, attention_mask=torch.ones(40, dtype=torch.long)),
        ValueError,
        r"attention_mask must have shape \[2, 40\], .*, got \[40\]",
    ),
    "mask of 3 dims": (
        lambda: call_with({}, attention_mask=torch.ones(2, 40, 40, dtype=torch.bool)),
        ValueError,
        r"attention_mask must have shape \[2, 40\], .*, got \[2, 40, 40\]",
    ),
    "documents behind a cache": (
        lambda: behind_a_cache(position_ids=(40 + torch.arange(40) % 17)[None]),
        NotImplementedError,
        "one document per sequence: give packed documents to a call without a cache",
    ),
    "a document behind a cache, in a padded batch": (
        lambda: behind_a_cache(
            position_ids=torch.arange(40)[None],
            attention_mask=torch.cat([torch.zeros(2, 9), torch.ones(2, 71)], 1),
        ),
        NotImplementedError,
        "one document per sequence",
    ),
    "wide boundaries": (
        lambda: packed_with(cu_seq_lens_q=torch.tensor([0, 17, 40])),
        TypeError,
        r"^htree: cu_seq_lens_q must have dtype torch.int32, got torch.int64",
    ),
    "boundaries in a list": (
        lambda: packed_with(cu_seq_lens_q=[0, 17, 40]),
        TypeError,
        "^htree: cu_seq_lens_q must be a Tensor, got list",
    ),
    "long documents": (
        lambda: packed_with(max_length_q=20),
        ValueError,
        "^htree: max_length_q must be at least the length of every document, got 20 and 23 rows",
    ),
    "encoder": (encoder, NotImplementedError, "only causal attention|not causal"),
    "weights": (lambda: call_with({}, output_attentions=True), NotImplementedError, "no weights to return"),
    "unknown option": (
        lambda: call_with({"options": {"topk": 4}}),
        ValueError,
        r"config\.htree must have keys among positions, packed, index_dim, compression_rate.*'topk'",
    ),
    "option of the model": (
        lambda: call_with({"options": {"rope_base": 1e6}}),
        ValueError,
        "got 'rope_base'",
    ),
    "value of an option": (
        lambda: call_with({"options": {"top_k": 0}}),
        ValueError,
        "^config.htree: top_k must be between 1 and .*, got 0",
    ),
    "scope": (
        lambda: call_with(
            {"options": {"scope": "head"}}, cu_seq_lens_q=torch.tensor([0, 4], dtype=torch.int32)
        ),
        ValueError,
        "^config.htree: scope must be one of kv_head, q_head, got 'head'",
    ),
    "positions": (
        lambda: call_with({"options": {"positions": "long"}}),
        ValueError,
        "own, compact, got 'long'",
    ),
    "no dict": (
        lambda: attention(no_dict(), *(torch.zeros(1, 2, 3, 4) for _ in range(3)), None),
        TypeError,
        "config.htree must be a dict of options or 'recommended', got 'fast'",
    ),
    **{
        f"empty {type(given).__name__}": (
            lambda given=given: attention(no_dict(given), *(torch.zeros(1, 2, 3, 4) for _ in range(3)), None),
            TypeError,
            "config.htree must be a dict of options or 'recommended', got",
        )
        for given in ([], 0, False, "", ())
    },
    "frequencies of the model": (
        lambda: call_with({"options": {"inv_freq": [1.0] * 4}}),
        ValueError,
        "got 'inv_freq'",
    ),
    "dynamic positions": (
        lambda: call_with({"options": COMPACT, "rope_parameters": DYNAMIC}),
        NotImplementedError,
        "do not follow the sequence length, .*got 'dynamic': use positions='own'",
    ),
    "longrope": (
        lambda: call_with({"options": COMPACT, "rope_parameters": LONG}),
        NotImplementedError,
        "do not follow the sequence length, .*got 'longrope': use positions='own'",
    ),
    "partial positions": (
        lambda: call_with({"options": COMPACT, "rope_parameters": PARTIAL}),
        NotImplementedError,
        "rotates whole heads, got partial_rotary_factor 0.5 with rope_type 'default': use positions='own'",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_it_cannot_do_is_refused_in_one_line(name):
    call, kind, message = REFUSALS[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"softcap": 30.0}, "soft cap"),
        ({"s_aux": torch.ones(4)}, "sinks"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"is_causal": False}, "not causal"),
        ({"position_bias": torch.ones(1)}, "bias"),
        ({"something": torch.ones(1)}, "passes 'something'"),
        ({"cache": object()}, "paged cache"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_keywords_of_other_models_are_refused(keywords, message):
    """Keywords that Llama never passes and other models do."""
    layer = make_model().model.layers[0].self_attn
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    assert attention(layer, q, k, k, None, num_items_in_batch=torch.ones(1))[0].shape == (1, 6, 4, 8)
    with pytest.raises(NotImplementedError, match=message):
        attention(layer, q, k, k, None, **keywords)


def test_keywords_of_losses_and_collators_change_nothing():
    """All tensors that transformers itself lists for a model's call or for its loss."""
    listed = {name for name, kind in TransformersKwargs.__annotations__.items() if "Tensor" in str(kind)}
    loss = {
        name for name, x in signature(ForCausalLMLoss).parameters.items() if "Tensor" in str(x.annotation)
    }
    listed -= {"cu_seq_lens_q", "cu_seq_lens_k", "position_ids"}  # these say what attention computes
    assert {"shift_labels", "num_items_in_batch", "seq_idx"} <= listed | loss
    layer, model = make_model().model.layers[0].self_attn, make_model()
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    wanted = attention(layer, q, k, k, None)[0]
    for name in listed | loss:
        assert torch.equal(attention(layer, q, k, k, None, **{name: torch.ones(1, 6)})[0], wanted)
    ids = make_ids()
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    wanted_loss = model(ids, labels=ids).loss
    torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, wanted_loss)


def test_compact_positions_need_a_known_model():
    layer = make_model(options=EXACT | {"positions": "compact"}).model.layers[0].self_attn

    class Other(torch.nn.Module):
        config, is_causal = layer.config, True

    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    with pytest.raises(
        NotImplementedError, match=r"not supported for Other, only for LlamaAttention, Mistral"
    ):
        attention(Other(), q, k, k, None)


def test_the_package_does_not_need_transformers():
    code = "import sys; sys.modules['transformers'] = None; import htree_ops, htree_ops.integrations"
    subprocess.run([sys.executable, "-c", code], check=True)
