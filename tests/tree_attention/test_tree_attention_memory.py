"""The scratch of a chunk on the tensor cores, as plan/ lays it out: every piece holds what the kernels write into it,
none overlaps another, and all of them together keep to the budgets of docs/semantics/tree_attention.md §1.8."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest

host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")

MIB = 2**20
ALIGNMENT = 256
FORWARD_SCRATCH = 896 * MIB
BACKWARD_SCRATCH = 1856 * MIB
LIST_SUMS, TOP_SUMS = 1584 * MIB, 1056 * MIB  # per-list kernels in all layers, at the top alone
GPUS = {
    "hopper": {"major": 9, "num_sms": 132},
    "small_hopper": {"major": 9, "num_sms": 114},
    "ampere": {"major": 8, "shared_bytes": 166_912, "num_sms": 108},
}
STRIDES = (1, 2, 4, 8, 16)
LENGTHS = (1, 2, 15, 16, 17, 255, 700, 4096, 8192, 8193, 9000, 32_768, 131_072, 200_000, 524_288, 2**20)
HEADS = (
    (1, 32, 4),
    (1, 32, 8),
    (1, 64, 4),
    (1, 8, 8),
    (2, 16, 1),
    (1, 24, 3),
    (70, 2, 1),
    (3, 36, 4),
    (1, 128, 8),
)
OPTIONS = ((8192, 512), (256, 16), (16_384, 1024), (100, 1000))  # M, k


@dataclass(frozen=True)
class Call:
    """A call on a GPU and what plan/ chose for it."""

    batch: int
    num_keys: int
    num_queries: int
    heads: int
    kv_heads: int
    width: int
    top_nodes: int
    top_k: int
    stride: int
    gpu: str
    span: int = 0  # 0: None
    rotate: bool = True

    @property
    def plan(self) -> host.TreeAttentionCall:
        sizes = (
            self.batch,
            self.num_keys,
            self.num_queries,
            self.heads,
            self.kv_heads,
            self.width,
            self.width,
        )
        options = {"max_top_nodes": self.top_nodes, "top_k": self.top_k, "selection_stride": self.stride}
        options |= {"selection_span": self.span, "rotate": self.rotate}
        return host.TreeAttentionCall(sizes, True, **options, **GPUS[self.gpu])

    @property
    def layers(self) -> list[int]:
        """Nodes of every layer, the tokens first."""
        nodes = [self.num_keys]
        while nodes[-1] > self.top_nodes:
            nodes.append(-(-nodes[-1] // 16))
        return nodes

    @property
    def mask_bytes(self) -> int:
        return -(-self.top_k * 16 // 128) * 16


def calls(lengths: tuple[int, ...] = LENGTHS) -> Iterator[Call]:
    grid = product(lengths, HEADS, (32, 64, 128), OPTIONS, STRIDES, GPUS)
    for length, (batch, heads, kv_heads), width, (top_nodes, top_k), stride, gpu in grid:
        for num_queries in {length, 1, -(-length // 3)}:
            call = Call(batch, length, num_queries, heads, kv_heads, width, top_nodes, top_k, stride, gpu)
            yield call
            if width == 64 and stride in (1, 16):
                yield from (replace(call, span=span) for span in (1, 4, 16))
            if width != 64 and stride <= 2:
                yield replace(call, rotate=False)


def facts(text: str) -> tuple[dict[str, int], dict[str, str]]:
    """The sizes of a configuration's chunks, and its kernels."""
    assert text.startswith("tensor_core ")
    words = dict(word.split("=") for word in text.split()[1:])
    numbers = {key: int(value) for key, value in words.items() if value.isdigit()}
    return numbers, {key: value for key, value in words.items() if key not in numbers}


def score_bytes(call: Call, chunk: dict[str, int], top: str) -> int:
    """Scores of the layer that needs most: of gathered lists with sums of runs; at a dense top references and
    importances, or the sums, references and runs of span means."""
    layers = call.layers
    lists = -(-chunk["query_chunk"] // call.stride)
    most = 0
    for layer, nodes in enumerate(layers[1:], 1):
        means = 16**layer // call.span if call.span else 1
        dense = top == "dense" and layer + 1 == len(layers)
        group = max(4, 128 // means)  # nodes with one reference
        if dense and means > 1 and -(-nodes // group) * (call.heads // call.kv_heads) * 4 <= 160 * 1024:
            rows = chunk["batch_chunk"] * chunk["top_chunk"] * call.heads
            run = group * max(1, 32 // max(1, means // 32))
            need = rows * (-(-nodes // 128) * 128 * 4 + -(-nodes // group) * 4 + -(-nodes // run) * 8)
        elif dense and means == 1:
            row = call.kv_heads * -(-nodes // 128) * 128 * 4
            need = chunk["batch_chunk"] * (lists * call.heads * 4 + chunk["top_chunk"] * row)
        else:
            candidates = min(call.top_k, -(-nodes // 16)) * 16
            rows = chunk["batch_chunk"] * chunk["selection_chunk"] * call.heads
            need = rows * (candidates * 4 + -(-candidates // 1024) * 8)
        most = max(most, need)
    return most


def marked_tasks(call: Call, chunk: dict[str, int]) -> tuple[int, int, int]:
    """Runs of masked rows of all heads, for a chunk that begins where most are cut; tiles and tokens of a run."""
    run = 2 ** (128 * call.kv_heads // call.heads).bit_length() // 2
    rows = min(chunk["query_chunk"], chunk["masked_rows"])
    tasks = chunk["batch_chunk"] * call.kv_heads * (-(-(rows - 1) // run) + 1)
    return tasks, -(-min(call.num_keys, max(chunk["masked_rows"], chunk["dense_rows"])) // 128), run


def mark_needs(call: Call, chunk: dict[str, int]) -> dict[str, int]:
    """Marks, tiles and counts of masked rows."""
    tasks, tiles, run = marked_tasks(call, chunk)
    return {"marks": tasks * tiles * max(16, run), "tiles": tasks * tiles * 2, "counts": tasks * 4}


def masked_gradient_needs(call: Call, chunk: dict[str, int]) -> dict[str, int]:
    """The query side of masked rows in tiles of 64 rows, marks, and for each tile of tokens the tiles of rows."""
    tasks, tiles, _ = marked_tasks(call, chunk)
    heads = chunk["batch_chunk"] * call.kv_heads
    return {
        "queries": 2 * tasks * 64 * max(64, call.width) * 2,
        "gradients": 2 * tasks * 64 * max(64, call.width) * 2,
        "numbers": 2 * tasks * 64 * 5 * 4,
        "scaled": 2 * tasks * 4,
        "bounds": heads * 8,
        **mark_needs(call, chunk),
        "inverted_tiles": 2 * tasks * tiles * 4,
        "inverted_tile_counts": heads * tiles * 4,
    }


def forward_needs(call: Call, chunk: dict[str, int], kernels: dict[str, str]) -> dict[str, int]:
    marks = mark_needs(call, chunk) if "masked_rows" in kernels["layers"] else {}
    if len(call.layers) == 1:
        return marks
    queries = chunk["batch_chunk"] * chunk["query_chunk"]
    lists = chunk["batch_chunk"] * -(-chunk["query_chunk"] // call.stride) * call.kv_heads
    return {
        "partial": queries * call.heads * call.width * 4,
        "lists": lists * call.top_k * 4,
        "next_lists": lists * call.top_k * 4,
        "mask": lists * call.mask_bytes,
        "scores": score_bytes(call, chunk, kernels["top"]),
        **marks,
    }


def layer_tasks(call: Call, chunk: dict[str, int], kernels: dict[str, str]) -> Iterator[tuple[int, int, int]]:
    """(layer, lists, tasks of a list) of the layers whose gradients the per-list kernels compute."""
    group = call.heads // call.kv_heads
    heads = chunk["batch_chunk"] * call.kv_heads
    for layer in range(len(call.layers)):
        top = layer + 1 == len(call.layers)
        if kernels["top_dK_dV" if top else "dK_dV"] != "per_list":
            continue
        if top and call.stride < 16 and group in (4, 8, 16):  # runs of 16 queries, the first and last cut
            queries, lists = 16, heads * (chunk["query_chunk"] // 16 + 2)
        else:
            queries, lists = call.stride, heads * -(-chunk["query_chunk"] // call.stride)
        yield layer, lists, -(-queries * group // 128)


def num_tasks(call: Call, chunk: dict[str, int], kernels: dict[str, str]) -> int:
    """The most tasks of the per-list kernels in a layer."""
    return max((lists * tasks for _, lists, tasks in layer_tasks(call, chunk, kernels)), default=0)


def backward_needs(
    call: Call, chunk: dict[str, int], kernels: dict[str, str], recompute: bool
) -> dict[str, int]:
    queries = chunk["batch_chunk"] * chunk["query_chunk"]
    chunk_lists = -(-chunk["query_chunk"] // call.stride)
    lists = chunk["batch_chunk"] * chunk_lists * call.kv_heads
    kv_heads = chunk["batch_chunk"] * call.kv_heads
    parents = -(-call.num_keys // 16)
    nodes = call.batch * call.kv_heads * sum(-(-nodes // 16) * 16 for nodes in call.layers)
    record = 2 * 2 * call.width  # a query in fp16 and a gradient in 16 bits
    needs = {
        "node_bounds": nodes * 2,
        "parent_bounds": nodes // 16 * 2,
        "earlier_bounds": nodes // 16 * 2,
        "query_bounds": kv_heads * 12,
        "list_bounds": lists * 2,
        "task_powers": num_tasks(call, chunk, kernels) * 8,
        "meta": queries * call.heads * 16,
        "counts": lists * 4,
    }
    bottom_dq = kernels["top_dQ" if len(call.layers) == 1 else "dQ"]
    if bottom_dq != "per_list":
        needs["records"] = queries * call.heads * record
        if kernels["dK_dV"] == "parent_gradient":
            rows = 8 if call.rotate or call.heads != 4 * call.kv_heads else 4  # two queries share a tile of 8
            needs["records"] = queries * call.kv_heads * rows * (record + 16)
    if kernels["dK_dV"] == "parent_gradient":
        needs["rotations"] = (call.top_k * 16 + 1) * call.width * 2
    if len(call.layers) > 1:
        needs |= {
            "query_sums": queries * call.heads * call.width * 4,
            "mask": lists * call.mask_bytes,
            "entries": lists * call.top_k * 4,
            "offsets": kv_heads * (parents + 1) * 4,
            "run_counts": kv_heads * -(-chunk_lists // 256) * parents * 4,
        }
        if recompute:
            needs["lists"] = (len(call.layers) - 1) * lists * call.top_k * 4
            needs["scores"] = score_bytes(call, chunk, kernels["top"])
    return needs


def sum_bytes(call: Call, chunk: dict[str, int], kernels: dict[str, str]) -> int:
    """Partial sums of the per-list kernels: of all lists of a chunk, or as many as the budget holds, at least one."""
    budget = LIST_SUMS if kernels["dQ"] == "per_list" else TOP_SUMS
    most = 0
    for layer, lists, tasks in layer_tasks(call, chunk, kernels):
        nodes = call.layers[layer]
        slots = -(-nodes // 16) if layer + 1 == len(call.layers) else call.top_k
        one = tasks * slots * 16 * 2 * 2 * call.width
        most = max(most, one * min(lists, max(1, budget // one)))
    return most


def check_pieces(found: dict[str, int], needs: dict[str, int], base: int) -> None:
    """Checks that each piece begins behind the bytes that the one before it needs, and that the last one fits."""
    end = base
    for name, need in sorted(needs.items(), key=lambda item: found[item[0]]):
        begin = found[name]
        assert begin >= end, f"{name} begins in the piece before it"
        assert begin % ALIGNMENT == 0, name
        end = begin + need
    assert end <= found["end"], "the last piece"


def test_the_forward_holds_what_it_writes_within_its_budget():
    base = 1 << 40
    for call in calls():
        plan = call.plan
        chunk, kernels = facts(plan.forward())
        found, sizes = plan.forward_memory(base), plan.forward_memory(0)
        assert sizes["end"] == found["end"] - base, call
        assert set(sizes.values()) == {0, sizes["end"]}, "without memory there are no pieces"
        check_pieces(found, forward_needs(call, chunk, kernels), base)
        assert sizes["end"] <= FORWARD_SCRATCH, call


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_the_backward_holds_what_it_writes_within_its_budget(recompute):
    base = 1 << 40
    for call in calls():
        plan = call.plan
        chunk, kernels = facts(plan.backward())
        if kernels["dQ"] == "halves":
            continue  # the memory is that of a call of twice as many K/V heads
        found, sizes = plan.backward_memory(base, recompute), plan.backward_memory(0, recompute)
        assert sizes["end"] == found["end"] - base, call
        assert sizes.pop("partials_end") == sum_bytes(call, chunk, kernels), call
        assert set(sizes.values()) == {0, sizes["end"]}, "without memory there are no pieces"

        needs = backward_needs(call, chunk, kernels, recompute)
        check_pieces(found, needs, base)
        # scores and partial sums share their memory: lists are selected before their gradients are summed
        assert found["scores"] == found["partials"] <= found["partials_end"] <= found["end"]

        masked = plan.masked_gradient_memory(base)
        if "token_dQ" in kernels:
            check_pieces(masked, masked_gradient_needs(call, chunk), base)
        else:
            assert masked["end"] == base
        assert masked["end"] - base <= found["end"] - found["partials"], "it lies in the memory of the sums"

        # what a chunk of any size needs: a table, and two counts for every parent; the bounds of nodes follow T
        fixed = needs.get("rotations", 0) + 2 * needs.get("offsets", 0) + len(found) * ALIGNMENT
        bounds = needs["node_bounds"] + needs["parent_bounds"] + needs["earlier_bounds"]
        assert bounds <= 2.4 * call.batch * call.kv_heads * (call.num_keys + 16 * len(call.layers)), call
        assert sizes["end"] - bounds <= BACKWARD_SCRATCH + fixed < 2**31, call


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("heads", [(32, 4, 128), (64, 4, 64), (8, 8, 128)], ids=str)
def test_a_gigabyte_holds_the_forward_but_a_copy_of_the_keys(heads, gpu):
    """Counts scratch, layers above the tokens with their copies, tiles of a dense top, scales, log-sums, tables."""
    lengths = (9000, 32_768, 131_072, 262_144, 524_288, 1_000_000)
    for length, stride, rotate in product(lengths, STRIDES, (True, False)):
        num_heads, kv_heads, width = heads
        call = Call(1, length, length, *heads, 8192, 512, stride, gpu, rotate=rotate)
        chunk, kernels = facts(call.plan.forward())
        above = call.layers[1:]
        tree = length * (kv_heads * 4 + num_heads * 8) + (512 * 16 + 1) * width * 4
        for nodes in above:
            tree += kv_heads * (nodes * 4 * width + -(-nodes // 16) * 16 * (4 * width + 4))
        if kernels["top"] == "dense":
            tree += kv_heads * -(-above[-1] // 128) * (128 * (2 * max(64, width) * 2 + 4) + 4)
        dense_rows = chunk["dense_rows"]
        tiled = min(length, max(dense_rows, chunk["masked_rows"]))
        tiles = kv_heads * -(-tiled // 128) * (128 * (2 * max(64, width) * 2 + 4) + 4)
        # where rows are masked, the packed copy of the tokens takes the place of the tiles
        copy = kv_heads * -(-length // 16) * 16 * (4 * width + 4) if chunk["masked_rows"] else 0
        tree += max(0, tiles - copy)
        total = call.plan.forward_memory(0)["end"] + tree
        assert total <= 10**9, call
        assert total >= 3 * 10**8 or chunk["query_chunk"] >= length - dense_rows, "and what there is is used"
