"""A training step and a prefill of a Llama-shaped model, with the ways in which one would run it.

Run: ``python -m benchmarks.models --csv PATH`` on a GPU with 120 GB; needs transformers. ``--quick`` takes the
shortest sequence and what need not be compiled, for a look. Eight layers of 4096 channels, bf16, one sequence of
random tokens. A training step is forward, backward and AdamW without the language model's head: the loss is the mean
square of the last hidden states. With an index the step also has the loss of each layer's index at 128 positions.
From 64k tokens on, every way checkpoints the activations of each layer, because the step would not fit otherwise. A
call of a second and more is a load of its own: its median is also its sustained time. ``--heads 64 4`` gives a model
of as wide heads that has another number of them. The ways run one after the other. Up to max_top_nodes tokens tree
attention computes what dense attention computes; beyond, the column ``same_function`` says that it does not. Figures
are reported, never asserted.
"""

from __future__ import annotations

import gc
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from benchmarks.harness import timing
from benchmarks.harness.plain_rows import Row, make_parser, parse_for_gpu, print_rows, where
from benchmarks.harness.progress import progress
from htree_ops import index_losses
from htree_ops.cli import regular_expression
from htree_ops.integrations import patch_model_
from htree_ops.integrations.transformers import register
from htree_ops.tuning.clock import clock_for

LENGTHS = (8_192, 32_768, 131_072)
CHECKPOINT_FROM = 65_536
#: Positions at which the index of a layer learns in a step.
INDEX_ROWS = 128


@dataclass(frozen=True)
class Size:
    """Sizes of the model, by the names of its config."""

    num_hidden_layers: int = 8
    hidden_size: int = 4096
    intermediate_size: int = 14_336
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    vocab_size: int = 32_768
    head_dim: int | None = None


@dataclass(frozen=True)
class Way:
    """How a model is run: with options of tree attention and fused parts, or with SDPA; compiled; patched by Liger."""

    name: str
    htree: dict[str, Any] | None = field(default=None)
    compiled: bool = False
    liger: bool = False


WAYS = (
    Way("eager + SDPA"),
    Way("torch.compile + SDPA", compiled=True),
    Way("Liger + SDPA", liger=True),
    Way("ours, stride 1", htree={"selection_stride": 1}),
    Way("ours, stride 1, span 2", htree={"selection_stride": 1, "selection_span": 2}),
    Way("ours, stride 4, span 2", htree={"selection_stride": 4, "selection_span": 2}),
    Way("ours, stride 16", htree={"selection_stride": 16}),
    # Where heads are narrower than 16 there is no index.
    Way("ours, index, stride 1", htree={"top_k": 128, "index_dim": None}),
    Way("ours, index, stride 4", htree={"top_k": 128, "index_dim": None, "selection_stride": 4}),
    Way("ours, stride 16, torch.compile", htree={"selection_stride": 16}, compiled=True),
)


def make_model(way: Way, size: Size, tokens: int, device: str, dtype: torch.dtype) -> LlamaModel:
    """The same weights for every way."""
    config = LlamaConfig(**asdict(size), max_position_embeddings=tokens, use_cache=False)
    if way.htree is not None:
        register()  # a model that is made from here on has the index that its config says
        config.htree = way.htree
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaModel._from_config(config, attn_implementation="sdpa", dtype=dtype)
    if way.htree is not None:
        patch_model_(model)
    if way.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    return model


def make_call(
    way: Way, phase: str, size: Size, tokens: int, device: str, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """A training step, which returns the loss before it, or a prefill, which returns the last hidden state."""
    model = make_model(way, size, tokens, device, dtype)
    ids = torch.randint(size.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    run: nn.Module | Callable[..., Any] = torch.compile(model, dynamic=False) if way.compiled else model
    if phase == "prefill":
        model.eval()

        def prefill() -> Tensor:
            with torch.no_grad():
                return run(ids).last_hidden_state[:, -1]

        return prefill
    model.train()
    if tokens >= CHECKPOINT_FROM:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device != "cpu")

    def step() -> Tensor:
        with index_losses(INDEX_ROWS) as losses:
            loss = run(ids).last_hidden_state.float().square().mean()
        (loss + losses.mean() if len(losses) else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def most_exact_tokens(way: Way) -> float:
    """Up to so many tokens the way computes dense attention."""
    if way.htree is None:
        return float("inf")
    rate, top_k = way.htree.get("compression_rate", 16), way.htree.get("top_k", 512)
    by_scores = way.htree.get("index_dim", 0) == 0
    return way.htree.get("max_top_nodes", min(8192, rate * top_k) if by_scores else 8192)


def measure(
    way: Way, phase: str, size: Size, tokens: int, device: str, dtype: torch.dtype, effort: timing.Effort
) -> Row:
    """Builds, times and drops the model of one row; ``peak_bytes`` counts the model too."""
    on_gpu = device != "cpu"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    call = make_call(way, phase, size, tokens, device, dtype)
    clock = clock_for(device)
    times = timing.measure_undisturbed({way.name: [call]}, clock, effort)[way.name]
    is_load = times.median_us >= 1e6
    sustained = times if is_load else timing.sustained([call], clock, times.median_us, effort)
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return {
        **where(device),
        "transformers": transformers.__version__,
        "phase": phase,
        "tokens": tokens,
        "layers": size.num_hidden_layers,
        "hidden": size.hidden_size,
        "heads": size.num_attention_heads,
        "kv_heads": size.num_key_value_heads,
        "dtype": str(dtype).removeprefix("torch."),
        "checkpointed": phase == "train" and tokens >= CHECKPOINT_FROM,
        "way": way.name,
        "same_function": tokens <= most_exact_tokens(way),
        "median_ms": times.median_us / 1e3,
        "p20_ms": times.p20_us / 1e3,
        "p80_ms": times.p80_us / 1e3,
        "sustained_ms": sustained.median_us / 1e3,
        "tokens_per_s": tokens / (times.median_us / 1e6),
        "peak_bytes": peak,
    }


def measure_all(
    work: Sequence[tuple[Way, str, Size, int, str, torch.dtype]], effort: timing.Effort
) -> Iterator[Row]:
    """The rows of what fits into memory; says what does not."""
    for item in progress(work, lambda item: f"{item[3]} tokens, {item[1]}, {item[0].name}"):
        try:
            yield measure(*item, effort)
        except torch.cuda.OutOfMemoryError:
            print(f"{item[3]} tokens, {item[1]}, {item[0].name}: out of memory", file=sys.stderr)
        torch._dynamo.reset()  # the model of this row goes before the next one is made
        gc.collect()
        if item[4] != "cpu":
            torch.cuda.empty_cache()


def available(ways: Sequence[Way]) -> Iterator[Way]:
    """Those that can run here; says which cannot."""
    for way in ways:
        if way.liger and importlib.util.find_spec("liger_kernel") is None:
            print(f"{way.name}: skipped, liger_kernel is not installed", file=sys.stderr)
        else:
            yield way


def main(argv: Sequence[str] | None = None, size: Size | None = None, ways: Sequence[Way] = WAYS) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser(
        "a training step and a prefill of a Llama-shaped model",
        rounds=5,
        quick="the first length alone, nothing compiled, few repetitions",
        cpu=True,
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=LENGTHS, help="lengths (default 8k, 32k, 128k)"
    )
    parser.add_argument("--phase", choices=("train", "prefill"), nargs="+", default=("prefill", "train"))
    parser.add_argument(
        "--way", type=regular_expression, default="", metavar="REGEX", help="only ways whose name matches"
    )
    parser.add_argument("--heads", type=int, nargs=2, metavar=("H", "H_kv"), help="heads of the model")
    arguments = parse_for_gpu(parser, argv)
    size = size or Size()
    if arguments.heads:
        width = size.hidden_size // size.num_attention_heads
        heads, kv_heads = arguments.heads
        size = replace(size, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    effort = timing.QUICK if arguments.quick else timing.Effort(rounds=arguments.rounds)
    ways = [
        way for way in ways if re.search(arguments.way, way.name) and not (arguments.quick and way.compiled)
    ]
    work = [
        (way, phase, size, tokens, arguments.device, dtype)
        for tokens in (arguments.tokens[:1] if arguments.quick else arguments.tokens)
        for phase in arguments.phase
        for way in available(ways)
    ]
    work.sort(
        key=lambda item: item[0].liger
    )  # last, because Liger changes the classes of transformers for good
    print_rows(measure_all(work, effort), arguments.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
