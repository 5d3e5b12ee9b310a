"""What the example prints and draws after training: comparison, attention's own time, sample, curves."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor
from tqdm import tqdm

from htree_ops import tree_attention
from htree_ops.reference.tree_attention import layer_sizes

from .model import (
    ByteLM,
    candidates_per_query,
    dense_attention,
    span_means_of_last_query,
)
from .settings import Settings
from .text import Text
from .training import Learner, Run, precision, wait_for

#: One timing: context length, then seconds per call forward and forward with backward, tree and dense.
Times = dict[str, float]


def tree_words(settings: Settings) -> str:
    """The depth of the tree, and the candidates per query beside those of dense attention."""
    sizes = layer_sizes(settings.context, settings.compression_rate, settings.max_top_nodes)
    counts = candidates_per_query(settings.context, settings)
    dense_mean = (settings.context + 1) / 2
    words = (
        f"tree over {settings.context} tokens: {len(sizes)} layers of {', '.join(map(str, sizes))} nodes; "
        f"the last query scores {int(counts[-1])} candidates, dense attention {settings.context}; "
        f"on average {counts.double().mean():.0f} and {dense_mean:.0f}"
    )
    means = span_means_of_last_query(settings.context, settings)
    if settings.index_dim:
        words += f"\n(to select, a query also multiplies an index of {settings.index_dim} numbers with every token)"
    if means:
        words += (
            f"\n(to select, the last query also scores {means} means of {settings.selection_span} tokens)"
        )
    if len(sizes) == 1:
        words += f"\n(one layer: --context {settings.context} is not above M = {settings.max_top_nodes}, "
        words += "so nothing is selected and this is dense attention)"
    return words


def comparison(learners: Sequence[Learner], unigram_bits: float) -> str:
    """Loss and speed of the models side by side, then which one is faster per step and by how much."""
    rows: list[tuple[str, Callable[[Learner], str]]] = [
        ("training, bits per byte", lambda x: f"{x.recent_bits():.3f}"),
        ("validation, bits per byte", lambda x: f"{x.validation[-1][1]:.3f}"),
        ("seconds per step, median", lambda x: f"{x.median_seconds():.3f}"),
        ("tokens per second", lambda x: f"{x.num_bytes_per_step / x.median_seconds():.0f}"),
    ]
    lines = [f"{'':28}" + "".join(f"{x.name:>10}" for x in learners)]
    lines += [f"{title:28}" + "".join(f"{cell(x):>10}" for x in learners) for title, cell in rows]
    lines.append(f"(frequencies of single bytes alone: {unigram_bits:.3f} bits per byte)")
    if len(learners) == 2:
        tree, dense = (x.median_seconds() for x in learners)
        fast, factor = ("tree", dense / tree) if tree <= dense else ("dense", tree / dense)
        lines.append(
            f"A whole step at {learners[0].settings.context} tokens: {fast} attention is {factor:.2f} times faster."
        )
    return "\n".join(lines)


def _seconds(call: Callable[[], object], device: str) -> float:
    """Median of up to five calls after one that warms up; a call of more than two seconds is taken once."""
    samples: list[float] = []
    while len(samples) < 6 and sum(samples) < 2.0:
        wait_for(device)
        started = time.perf_counter()
        call()
        wait_for(device)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples[1:] or samples)


def attention_times(settings: Settings, lengths: Sequence[int], dense: bool = True) -> list[Times]:
    """Times both attentions alone, one sequence per call, heads and dtype as in the model.

    Returns, per length T, seconds under ``tree_forward``, ``tree_training`` (forward and backward) and, unless
    switched off, ``dense_forward`` and ``dense_training``. Rotary positions belong to both.
    """
    options = {
        name: getattr(settings, name)
        for name in ("compression_rate", "top_k", "max_top_nodes", "selection_stride")
    } | {"selection_span": settings.selection_span or None}
    kinds: dict[str, Callable[..., Any]] = {
        "tree": lambda q, k, v, index: tree_attention(q, k, v, index=index, **options)
    }
    if dense:
        kinds["dense"] = lambda q, k, v, _: dense_attention(q, k, v)
    on_gpu = torch.device(settings.device).type == "cuda"
    generator = torch.Generator().manual_seed(settings.seed)
    table: list[Times] = []
    if not lengths:
        return table

    def normal(length: int, heads: int, width: int) -> Tensor:
        drawn = torch.randn(1, length, heads, width, generator=generator)
        return drawn.to(settings.device, torch.bfloat16 if on_gpu else torch.float32)

    width = settings.dim // settings.heads
    for length in tqdm(lengths, desc="timing attention", unit="length"):
        q, k, v = (
            normal(length, heads, width).requires_grad_()
            for heads in (settings.heads, settings.kv_heads, settings.kv_heads)
        )
        index = None
        if settings.index_dim:
            index = tuple(normal(length, settings.kv_heads, settings.index_dim) for _ in range(2))
        row: Times = {"T": length}
        for name, attention in kinds.items():
            call = partial(attention, q, k, v, index)
            row[f"{name}_forward"] = _seconds(torch.no_grad()(call), settings.device)
            row[f"{name}_training"] = _seconds(partial(_gradients, call, (q, k, v)), settings.device)
        table.append(row)
    return table


def _gradients(call: Callable[[], Tensor], inputs: Sequence[Tensor]) -> None:
    torch.autograd.grad(call().sum(), inputs)


def times_table(times: Sequence[Times], settings: Settings) -> str:
    """The rows of :func:`attention_times` in milliseconds, dense over tree as the factor."""
    dtype = "bfloat16" if torch.device(settings.device).type == "cuda" else "float32"
    lines = [
        f"attention alone, ms per sequence (H = {settings.heads}, H_kv = {settings.kv_heads}, "
        f"D = {settings.dim // settings.heads}, {dtype}):",
        f"{'T':>8}{'forward: tree':>16}{'dense':>10}{'factor':>8}{'fwd+bwd: tree':>16}{'dense':>10}{'factor':>8}",
    ]
    for row in times:
        line = f"{int(row['T']):>8}"
        for kind in ("forward", "training"):
            ours, theirs = row[f"tree_{kind}"], row.get(f"dense_{kind}")
            line += f"{1e3 * ours:>16.1f}"
            line += f"{1e3 * theirs:>10.1f}{theirs / ours:>7.1f}x" if theirs else f"{'-':>10}{'-':>8}"
        lines.append(line)
    slower = [str(int(row["T"])) for row in times if row.get("dense_training", 1e9) < row["tree_training"]]
    if slower:
        lines.append(f"Dense attention trains faster at T = {', '.join(slower)}.")
    return "\n".join(lines)


@torch.no_grad()
def generate(model: ByteLM, text: Text, settings: Settings, num_bytes: int) -> tuple[str, str]:
    """Prompt (validation text, longer than the top layer if the context allows) and its continuation.

    Each byte runs the whole prefix again: the example has no cache of keys.
    """
    model.eval()
    size = min(2 * settings.max_top_nodes, settings.context, text.validation.numel())
    tokens = text.validation[:size].long()[None].to(settings.device)
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in tqdm(range(num_bytes), desc="sampling", unit="byte", leave=False):
        with precision(settings.device):
            logits = model(tokens[:, -settings.context :])[0, -1]
        share = torch.softmax(logits.float().cpu() / 0.7, dim=-1)
        chosen = torch.multinomial(share, 1, generator=generator).to(settings.device)
        tokens = torch.cat((tokens, chosen[None]), dim=1)
    raw = bytes(tokens[0].tolist())
    return raw[:size].decode(errors="replace"), raw[size:].decode(errors="replace")


def write_history(
    path: Path, run: Run, unigram_bits: float, times: Sequence[Times], copies: Mapping[str, float]
) -> None:
    """Settings, curves, times and shares of copies found as JSON."""
    content = {
        "settings": vars(run.settings),
        "unigram_bits_per_byte": unigram_bits,
        "models": {learner.name: learner.history() for learner in run.learners},
        "attention_seconds": list(times),
        "copies_found": dict(copies),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def draw_curves(path: Path, run: Run, unigram_bits: float, times: Sequence[Times]) -> None:
    """Bits per byte over steps and, where measured, attention's time over T, as one PNG."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2 if times else 1, figsize=(11 if times else 6, 4.2), squeeze=False)
    left = axes[0][0]
    for learner, colour in zip(run.learners, ("tab:green", "tab:gray"), strict=False):
        steps = range(1, len(learner.train) + 1)
        left.plot(steps, learner.train, color=colour, alpha=0.35, linewidth=0.8)
        points = learner.validation
        left.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=learner.name)
    left.axhline(unigram_bits, color="black", linestyle=":", linewidth=1, label="single-byte entropy")
    left.set(xlabel="step", ylabel="bits per byte", title="training (thin) and validation")
    left.legend()
    if times:
        right = axes[0][1]
        lengths = [row["T"] for row in times]
        for kind, colour in (("tree", "tab:green"), ("dense", "tab:gray")):
            for work, style in (("forward", "--"), ("training", "-")):
                if f"{kind}_{work}" in times[0]:
                    seconds = [1e3 * row[f"{kind}_{work}"] for row in times]
                    label = f"{kind}, {'forward' if work == 'forward' else 'forward + backward'}"
                    right.plot(lengths, seconds, style, color=colour, marker="o", markersize=3, label=label)
        right.set(xlabel="T, tokens", ylabel="ms", title="attention alone", xscale="log", yscale="log")
        right.set_xticks(lengths, [f"{int(length)}" for length in lengths])
        right.minorticks_off()
        right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
