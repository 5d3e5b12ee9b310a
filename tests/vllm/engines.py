"""Engines of vLLM on small random models, and what transformers generates with the same weights."""

import contextlib
import gc
import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from htree_ops.integrations.transformers import register
from htree_ops.integrations.vllm import backend, steps
from htree_ops.ops.index_loss.layers import WEIGHTS

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.25,  # of the usual 0.02 attention would be nearly uniform
}
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "seed": 0,
}


def save_model(folder: Path, kind: str, **config: Any) -> Path:
    """A model with random weights, those of an index too, the same for the same kind and sizes."""
    register()
    made = getattr(transformers, f"{kind}Config")(**(SIZES | config))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(made).float().eval()
    for name, weight in model.named_parameters():
        if name.rpartition(".")[2] in WEIGHTS:
            weight.data.normal_()
    path = folder / kind
    model.save_pretrained(path)
    return path


def load_model(path: Path, attention: str, **config: Any) -> PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, **config)
    return model.float().eval()


@contextlib.contextmanager
def engine(path: Path, **options: Any) -> Iterator[LLM]:
    llm = LLM(model=str(path), **(COMMON | options))
    yield llm
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def prompts(*lengths: int, seed: int = 0, vocabulary: int = 512) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, vocabulary) for _ in range(n)] for n in lengths]


def generate(llm: LLM, ids: Sequence[Sequence[int]], tokens: int = 8) -> list[Any]:
    """The requests of prompts that come at once, in their order."""
    asked = [{"prompt_token_ids": list(x)} for x in ids]
    return llm.generate(asked, greedy(tokens), use_tqdm=False)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)


def tokens_of(request: Any) -> list[int]:
    return list(request.outputs[0].token_ids)


def metric(llm: LLM, name: str) -> int:
    """The value of a counter of the engine."""
    return sum(x.value for x in llm.get_metrics() if x.name == name)


@torch.no_grad()
def assert_generated(model: PreTrainedModel, prompt: Sequence[int], found: Sequence[int]) -> None:
    """The tokens are those that the model of transformers chooses one after the other, from a whole call each.

    One call over all of them says the same: row t of a causal model does not depend on what stands behind it.
    """
    ids = torch.tensor([[*prompt, *found]])
    chosen = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert list(found) == chosen.tolist()


# ---- what the op gets


@dataclass
class Call:
    """One call of the attention of a layer."""

    layer: int
    step: steps.Step
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    index: tuple[Tensor, ...]


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Copies of all that attention gets and gives meanwhile."""
    calls: list[Call] = []
    plain = backend.attend_step

    def record(
        options: Any,
        cache: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        step: steps.Step,
        out: Tensor,
        index: steps.Index | None,
    ) -> None:
        plain(options, cache, query, key, value, step, out, index)
        n = step.num_rows
        kept = {"cu_rows", "lengths", "block_table", "before", "counts", "places"}
        copy = steps.Step(**vars(step) | {name: getattr(step, name).clone() for name in kept})
        rows = [x[:n].clone() for x in (query, key, value, out)]
        calls.append(Call(cache.data_ptr(), copy, *rows, tuple(x[:n].clone() for x in index or ())))

    backend.attend_step = record
    try:
        yield calls
    finally:
        backend.attend_step = plain


@contextlib.contextmanager
def recorded_steps(name: str, max_tokens: int) -> Iterator[None]:
    """Writes what the scheduler decides meanwhile, from the start of an engine on, if HTREE_RECORD_STEPS is a folder.

    tests/integrations/test_vllm_steps.py runs it again, on a GPU too. Pages are numbered as they come into use.
    """
    if "HTREE_RECORD_STEPS" not in os.environ:
        yield
        return
    found: list[dict[str, Any]] = []
    numbers = {0: 0}
    page_size = 0
    plain = steps.Steps.make

    def record(self: steps.Steps, num_rows: int, max_rows: int, *tensors: Any) -> steps.Step:
        nonlocal page_size
        cu_rows, lengths, table = tensors[:3]
        page_size = self.page_size
        pages = [-(-n // page_size) for n in lengths.tolist()]
        tables = [row[:n] for row, n in zip(table.tolist(), pages, strict=True)]
        found.append(
            {
                "num_rows": num_rows,
                "max_rows": max_rows,
                "cu_rows": cu_rows.tolist(),
                "lengths": lengths.tolist(),
                "tables": [[numbers.setdefault(page, len(numbers)) for page in row] for row in tables],
            }
        )
        return plain(self, num_rows, max_rows, *tensors)

    steps.Steps.make = record
    try:
        yield
    finally:
        steps.Steps.make = plain
    record = {"page_size": page_size, "max_tokens": max_tokens, "num_pages": len(numbers), "steps": found}
    path = Path(os.environ["HTREE_RECORD_STEPS"], f"{name}.json")
    path.write_text(json.dumps(record, separators=(",", ":")).replace('{"num_rows"', '\n{"num_rows"') + "\n")


def rows_by_request(calls: Sequence[Call]) -> dict[tuple[int, int], list[Tensor]]:
    """Queries, keys, values, outputs and an index of each layer and request, by its first block, in order of tokens."""
    found: dict[tuple[int, int], list[list[Tensor]]] = {}
    for call in calls:
        bounds = call.step.cu_rows.tolist()
        for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
            key = call.layer, int(call.step.block_table[b, 0])
            rows = [x[begin:end] for x in (call.query, call.key, call.value, call.out, *call.index)]
            found.setdefault(key, []).append(rows)
    return {key: [torch.cat(x) for x in zip(*parts, strict=True)] for key, parts in found.items()}
