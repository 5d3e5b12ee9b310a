"""Tree attention with the sequence on several GPUs against the same sequence on one.

Run: ``torchrun --nproc-per-node 2 -m benchmarks.context_parallel --csv PATH`` on GPUs with 100 GB: about two minutes.
Every rank measures both: the whole sequence on its own GPU, and its part of it together with the others. A time is
the median of the rounds, each of which counts the slowest rank. Figures are reported; with ``--bars`` the status is 1
where a length misses its efficiency under every balance.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lm.parallel import leave
from torch import Tensor

from benchmarks.harness.calls import peak_of
from benchmarks.harness.plain_rows import Row, make_parser, print_rows, where
from htree_ops import tree_attention
from htree_ops.distributed import shard_sequence, tree_attention_cp
from htree_ops.distributed.collectives import added, all_gather, cut, exchange, group_of, join, waited
from htree_ops.distributed.context_parallel import choose_steps
from htree_ops.ops.tree_attention.attention import BALANCES

#: Tokens, what is measured, and the efficiency that two H200s should reach at selection_stride 16.
PROBLEMS = (
    (524_288, "forward and backward", 0.96),
    (131_072, "forward and backward", 0.92),
    (1_048_576, "forward", 0.96),
)


@dataclass(frozen=True)
class Bench:
    """The sizes of a run."""

    device: torch.device
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    options: dict[str, Any]
    rounds: int
    steps: int | None

    def wait(self) -> None:
        """Until every rank has come here with nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def once(self, call: Callable[[], Any]) -> float:
        """Milliseconds of a call on the slowest rank."""
        self.wait()
        begin = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        taken = torch.tensor((time.perf_counter() - begin) * 1e3, device=self.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    def times(self, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Medians of calls that take turns, after one turn that does not count."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(self.rounds + 1):
            for name, call in calls.items():
                taken = self.once(call)
                if turn:
                    found[name].append(taken)
        return {name: statistics.median(all_of_it) for name, all_of_it in found.items()}

    def peak(self, call: Callable[[], Any]) -> int:
        """The most bytes of a call beyond those before."""
        if self.device.type != "cuda":
            return 0
        self.wait()
        return peak_of(call)[1]

    def inputs(self, tokens: int) -> list[Tensor]:
        """q, k, v and an upstream gradient, the same on every rank."""
        generator = torch.Generator(self.device).manual_seed(0)
        return [
            torch.randn(
                1, tokens, heads, self.width, dtype=self.dtype, device=self.device, generator=generator
            )
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]


def attend(call: Callable[..., Any], tensors: Sequence[Tensor], gradients: bool) -> None:
    """A call, with its gradients where they are asked for."""
    *qkv, dout = tensors
    if not gradients:
        with torch.no_grad():
            call(*qkv)
        return
    leaves = [x.detach().requires_grad_() for x in qkv]
    torch.autograd.grad(call(*leaves), leaves, dout)


def measure(bench: Bench, tokens: int, what: str) -> list[Row]:
    """A row per balance; ``efficiency`` is one_ms / (ranks * many_ms), bytes are the most allocated on rank 0."""
    group = group_of("context_parallel", None)
    size = dist.get_world_size()
    gradients = what != "forward"
    whole = bench.inputs(tokens)
    one = partial(attend, partial(tree_attention, **bench.options), whole, gradients)
    calls: dict[str, Callable[[], Any]] = {"one": one}
    peaks = {"one": bench.peak(one)}
    for balance in BALANCES:
        parts = [shard_sequence(x, group, balance=balance) for x in whole]
        many = partial(
            tree_attention_cp, group=group, balance=balance, gather_steps=bench.steps, **bench.options
        )
        calls[balance] = partial(attend, many, parts, gradients)
        peaks[balance] = bench.peak(calls[balance])
    k, v = (shard_sequence(x, group) for x in whole[1:3])
    calls["gather"] = lambda: [join(waited(all_gather(x, group.group_name)), 1, "zigzag") for x in (k, v)]
    if gradients:
        sent = cut(whole[1].float(), size, 1, "zigzag")  # the sums are exchanged as they are
        calls["exchange"] = lambda: [added(exchange(sent, group.group_name), 1) for _ in range(2)]
    times = bench.times(calls)
    num_bytes = (whole[1].numel() + whole[2].numel()) * whole[1].element_size()
    steps = bench.steps or choose_steps(bench.kv_heads, num_bytes, size)
    return [
        {
            **where(bench.device.type),
            "ranks": size,
            "T": tokens,
            "selection_stride": bench.options["selection_stride"],
            "what": what,
            "balance": balance,
            "gather_steps": steps,
            "one_ms": times["one"],
            "many_ms": times[balance],
            "efficiency": times["one"] / (size * times[balance]),
            "gather_ms": times["gather"],
            "exchange_ms": times["exchange"] if gradients else 0.0,
            "one_bytes": peaks["one"],
            "many_bytes": peaks[balance],
        }
        for balance in BALANCES
    ]


def bars_met(rows: Sequence[Row], bars: dict[int, float]) -> bool:
    """Prints what each length has reached beside its bar; whether all of them have."""
    met = True
    for tokens, bar in bars.items():
        best = max((row for row in rows if tokens == row["T"]), key=lambda row: row["efficiency"])
        reached = best["efficiency"] >= bar
        met = met and reached
        print(
            f"T = {tokens}, {best['what']}: {100 * best['efficiency']:.1f} % ({best['balance']}), "
            f"bar {100 * bar:.0f} %: {'met' if reached else 'MISSED'}"
        )
    return met


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table on rank 0 and writes it where ``--csv`` says. Status 1: a bar was missed, with ``--bars``."""
    parser = make_parser("tree attention on several GPUs against one", rounds=5, cpu=True)
    parser.add_argument("--stride", type=int, default=16, help="selection_stride (default 16)")
    parser.add_argument("--steps", type=int, help="gather_steps (default: chosen by the length)")
    parser.add_argument("--tokens", type=int, help="this length alone, forward and backward")
    parser.add_argument(
        "--bars", action="store_true", help="print what two H200s should reach; status 1 if missed"
    )
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    heads, kv_heads, width = (32, 4, 128) if on_gpu else (4, 1, 32)
    options = {"selection_stride": arguments.stride} | ({} if on_gpu else {"top_k": 16, "max_top_nodes": 128})
    dtype = torch.bfloat16 if on_gpu else torch.float32
    bench = Bench(device, heads, kv_heads, width, dtype, options, arguments.rounds, arguments.steps)
    problems = ((arguments.tokens, "forward and backward", 0.0),) if arguments.tokens else PROBLEMS

    def measured() -> Iterator[Row]:
        for tokens, what, _ in problems:
            yield from measure(bench, tokens, what)
            if on_gpu:
                torch.cuda.empty_cache()

    status = 0
    if dist.get_rank() == 0:
        rows = print_rows(measured(), arguments.csv)
        if arguments.bars:
            status = int(not bars_met(rows, {tokens: bar for tokens, _, bar in problems}))
    else:
        list(measured())
    return status


if __name__ == "__main__":
    leave(main())
