"""Which kernels a call of tree attention takes on a GPU; problem and device decide, so no GPU is needed."""

import pytest
from tree_attention_fast import LARGE

host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")

MODEL = (1, 131_072, 131_072, 32, 4, 128, 128)  # B, T, T_q, H, H_kv, K, V

AMPERE = {"major": 8, "shared_bytes": 166_912}
#: Those that have no kernels of Hopper.
OTHERS = {
    "ampere": AMPERE,
    "not_compiled": {"hopper_kernels": False},
    "blackwell": {"major": 10},
    "little_shared_memory": {"shared_bytes": 166_912},
}


def describe(
    sizes: tuple[int, ...] = MODEL,
    half: bool = True,
    backward: bool = False,
    **options: int | bool | list[int],
) -> list[str]:
    call = host.TreeAttentionCall(sizes, half, **options)
    return (call.backward() if backward else call.forward()).split()


def path(sizes: tuple[int, ...] = MODEL, half: bool = True, **options: int | bool) -> str:
    return describe(sizes, half, **options)[0]


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 8, 16])
def test_model_shapes_take_the_tensor_cores(width, group):
    assert path((2, 5000, 5000, 2 * group, 2, width, width)) == "tensor_core"


@pytest.mark.parametrize(
    ("sizes", "half", "options"),
    [
        (MODEL, False, {}),
        ((1, 5000, 5000, 8, 1, 96, 96), True, {}),
        ((1, 5000, 5000, 8, 1, 64, 128), True, {}),
        ((1, 5000, 5000, 34, 2, 64, 64), True, {}),
        (MODEL, True, {"compression_rate": 8, "max_top_nodes": 4096}),
        (MODEL, True, {"top_k": 1025}),
        (MODEL, True, {"major": 7}),
        (MODEL, True, {"major": 12, "shared_bytes": 101_376}),
    ],
    ids=["fp32", "width_96", "k_not_v", "group_17", "r_8", "long_lists", "volta", "little_shared_memory"],
)
def test_everything_else_takes_the_general_kernels(sizes, half, options):
    assert path(sizes, half, **options) == "general"
    assert path(sizes, half, **options, backward=True) == "general"


def choices(
    sizes: tuple[int, ...] = MODEL, half: bool = True, **options: int | bool | list[int]
) -> dict[str, str]:
    return dict(word.split("=") for word in describe(sizes, half, **options)[1:])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
def test_the_top_of_a_tree_is_dense_on_hopper(group, width, backward):
    assert choices((2, 20_000, 7, 2 * group, 2, width, width), backward=backward)["top"] == "dense"


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 20_000, 20_000, 6, 2, 64, 64), {}),
        ((1, 8192, 8192, 8, 1, 64, 64), {}),
        (MODEL, {"major": 8}),
        (MODEL, {"major": 10}),
        (MODEL, {"hopper_kernels": False}),
        (MODEL, {"shared_bytes": 166_912}),
        ((1, 20_000, 20_000, 8, 1, 96, 96), {}),
    ],
    ids=["group_3", "one_layer", "ampere", "blackwell", "other_code", "little_shared_memory", "general"],
)
def test_every_other_top_is_gathered(sizes, options):
    assert choices(sizes, **options)["top"] == "gathered"


@pytest.mark.parametrize("rows", [1, 216, 512, 513, 1024])
def test_rows_before_the_first_selection_lay_out_no_top(rows):
    """Their table of rotations is as long as the rows, and may end before the nodes of the top do."""
    found = choices((1, 7000, rows, 8, 2, 128, 128), max_top_nodes=512, top_k=64, starts=[0])
    assert found["top"] == ("gathered" if rows <= 512 else "dense")
    assert found["layers"].startswith("dense_rows") == (rows <= 512)


@pytest.mark.parametrize("stride", [1, 16])
@pytest.mark.parametrize("length", [9000, 32_768, 131_072, 1_048_576])
def test_importances_are_bounded_and_chunks_even(length, stride):
    found = choices((1, length, length, 32, 4, 128, 128), selection_stride=stride)
    top = -(-length // 16)
    while top > 8192:
        top = -(-top // 16)
    lists, chunk = int(found["top_chunk"]), int(found["query_chunk"]) // stride
    assert 1 <= lists <= chunk
    assert lists * 4 * (-(-top // 128) * 128) * 4 + chunk * 32 * 4 <= 448 * 2**20
    total = -(-(length - 8192) // stride)  # the rows before max_top_nodes are dense
    if chunk < total:
        last = total - (-(-total // chunk) - 1) * chunk
        assert last > chunk // 2 or -(-total // chunk) > 4


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("stride", [1, 16])
@pytest.mark.parametrize("length", [32_768, 131_072, 1_048_576])
def test_chunks_bound_the_scratch(length, stride, backward):
    sizes = (1, length, length, 32, 4, 128, 128)
    chunks = choices(sizes, selection_stride=stride, backward=backward)
    queries, lists = int(chunks["query_chunk"]), int(chunks["selection_chunk"])
    assert queries % stride == 0
    assert queries * 32 * 128 * 4 <= 2**30 * (3 if backward else 1)
    widest = min(8192, length // 16)  # candidates of a list above the bottom
    assert lists * 32 * widest * 4 <= 2**29


@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize("stride", [1, 4, 16])
@pytest.mark.parametrize("num_sms", [132, 114])
def test_chunks_fill_whole_waves_of_blocks(kv_heads, stride, num_sms):
    length = 1_000_000
    sizes = (1, length, length, 8 * kv_heads, kv_heads, 128, 128)
    queries = int(choices(sizes, selection_stride=stride, num_sms=num_sms)["query_chunk"])
    assert queries < length
    assert queries % 16 == 0
    assert queries // 16 * kv_heads % num_sms == 0


@pytest.mark.parametrize("stride", [4, 16])
@pytest.mark.parametrize("length", [131_072, 524_288])
@pytest.mark.parametrize(("num_sms", "wave"), [(132, 1056), (114, 1824), (78, 1248)])
def test_chunks_fill_whole_waves_of_scores(length, stride, num_sms, wave):
    """A block scores 32 lists of 8 heads at the top; where a chunk holds no wave of them, those of the others count."""
    sizes = (1, length, length, 32, 4, 128, 128)
    found = choices(sizes, selection_stride=stride, num_sms=num_sms)
    lists = int(found["query_chunk"]) // stride
    assert (lists % wave == 0) == (lists >= wave)
    assert lists >= wave or num_sms < 132


def layers(sizes: tuple[int, ...] = MODEL, half: bool = True, **options: int | bool) -> list[str]:
    """The kernels of every layer of a forward, the top first."""
    return choices(sizes, half, **options)["layers"].split(",")


# Lengths of the table of figures, and how many layers lie below a top of at most 8192 nodes.
LENGTHS = {4096: 0, 32_768: 1, 65_536: 1, 131_072: 1, 262_144: 2, 524_288: 2, 1_048_576: 2}
HEADS = {(32, 4): 8, (64, 4): 16, (8, 8): 1}  # H, H_kv


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("stride", [1, 2, 4, 8, 16])
def test_kernels_of_every_layer_on_hopper(length, heads, width, stride):
    gathered = "per_list" if stride >= 4 else "shared_gather"
    above = LENGTHS[length]
    wanted = ["dense_rows"] if above == 0 else ["dense"] + [gathered] * above
    sizes = (1, length, length, *heads, width, width)
    assert layers(sizes, selection_stride=stride) == wanted
    suffix = (1, length, 64, *heads, width, width)
    assert layers(suffix, selection_stride=stride) == wanted, "however many queries a call has"
    ampere = layers(sizes, selection_stride=stride, **AMPERE)
    assert ampere == ["per_query"] * (above + 1)


@pytest.mark.parametrize("stride", [1, 16])
def test_the_large_problem_of_the_gpu_tests_takes_the_fast_kernels(stride):
    length, heads, kv_heads, width = (LARGE[key] for key in ("T", "H", "H_kv", "K"))
    found = layers(
        (1, length, length, heads, kv_heads, width, width),
        top_k=LARGE["top_k"],
        max_top_nodes=LARGE["M"],
        selection_stride=stride,
    )
    assert found == ["dense", *["shared_gather" if stride == 1 else "per_list"] * 3]


def test_info_lists_every_choice_of_kernels():
    listed = host.kernel_configurations().get("tree_attention")
    if listed is None:
        pytest.skip("built without CUDA")
    for group in range(1, 17):
        for stride in (1, 2, 4, 8, 16):
            sizes = (1, 131_072, 131_072, group, 1, 128, 128)
            forward = choices(sizes, selection_stride=stride)
            backward = choices(sizes, selection_stride=stride, backward=True)
            kernels = [f"layers={forward['layers']}"]
            kernels += [f"{key}={backward[key]}" for key in ("dQ", "dK_dV", "top_dQ", "top_dK_dV")]
            assert any(" ".join(kernels) in line for line in listed), kernels
            masked = choices(sizes, selection_stride=stride, backward=True, rotate=False)
            if "token_dQ" in masked:
                tokens = " ".join(f"{key}={masked[key]}" for key in ("token_dQ", "token_dK_dV"))
                assert any(tokens in line and "rope_base=None" in line for line in listed), tokens


def test_the_shape_of_the_public_triton_version():
    assert layers((1, 120_000, 120_000, 64, 4, 32, 32)) == ["dense", "shared_gather"]
    assert layers((1, 120_000, 120_000, 64, 4, 32, 32), half=False) == ["general", "general"]


def test_group_sizes_without_a_dense_top():
    for group in (3, 5, 6, 7, 9, 12, 15):
        sizes = (2, 20_000, 20_000, 2 * group, 2, 64, 64)
        assert layers(sizes) == ["shared_gather", "shared_gather"]
        assert layers(sizes, selection_stride=16) == ["per_list", "per_list"]


@pytest.mark.parametrize("stride", [1, 16])
@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_other_gpus_and_builds_gather_for_each_query(options, stride):
    assert layers(selection_stride=stride, **options) == ["per_query", "per_query"]


@pytest.mark.parametrize("stride", [1, 16])
def test_a_gather_for_each_query_on_request(stride):
    assert layers(selection_stride=stride, per_query_gather=True) == ["dense", "per_query"]
    assert choices(selection_stride=stride, per_query_gather=True)["dense_rows"] == "0"


@pytest.mark.parametrize(("stride", "top_nodes", "end"), [(1, 8192, 8192), (16, 8191, 8176), (16, 13, 0)])
def test_dense_rows_end_where_a_list_begins(stride, top_nodes, end):
    for length, queries, batch in ((100_000, 100_000, 1), (100_000, 7, 3), (8176, 8176, 16), (20, 20, 1)):
        found = choices(
            (batch, length, queries, 32, 4, 128, 128), selection_stride=stride, max_top_nodes=top_nodes
        )
        assert int(found["dense_rows"]) == end, "whatever the length and the batch"
        assert (found["layers"] == "dense_rows") == (length <= end)


def test_dense_rows_follow_max_top_nodes_and_need_hopper():
    assert choices(top_k=128, max_top_nodes=2000)["dense_rows"] == "2000"
    for options in OTHERS.values():
        assert choices(**options)["dense_rows"] == "0"
    assert choices(half=False)["dense_rows"] == "0"


@pytest.mark.parametrize("stride", [1, 16])
def test_forward_and_backward_take_the_same_rows_as_dense(stride):
    for options in ({}, {"top_k": 128, "max_top_nodes": 2000}, {"major": 10}, {"per_query_gather": True}):
        options = {**options, "selection_stride": stride}
        assert choices(backward=True, **options)["dense_rows"] == choices(**options)["dense_rows"]
    assert choices((6, 8192, 8192, 32, 4, 128, 128), backward=True)["query_chunk"] == str(1), "no row walks"


def test_a_call_of_dense_rows_alone_needs_no_scratch():
    call = host.TreeAttentionCall((16, 8192, 8192, 32, 4, 128, 128), True)
    assert call.forward_memory(0)["end"] == 0


# Heads per K/V head, and how many times k r tokens multiply masked tiles.
MASKED = {1: 8, 2: 8, 3: 8, 4: 8, 5: 6, 7: 4, 8: 4, 9: 3, 12: 2, 16: 2}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("group", MASKED)
def test_masked_rows_follow_the_options_alone(group, stride, backward):
    for top_k, top_nodes in ((512, 8192), (16, 100)):
        end = MASKED[group] * top_k * 16
        for width in (32, 64, 128):
            for length, queries, batch in (
                (100_000, 100_000, 1),
                (100_000, 1, 3),
                (9000, 9000, 2),
                (20, 20, 1),
            ):
                found = choices(
                    (batch, length, queries, 4 * group, 4, width, width),
                    selection_stride=stride,
                    top_k=top_k,
                    max_top_nodes=top_nodes,
                    rotate=False,
                    backward=backward,
                )
                assert int(found["masked_rows"]) == end, "whatever the length, the batch and the queries"
                assert end % 128 == 0, "no list and no run reaches across it"


def test_tiles_of_masked_rows_are_numbered_in_16_bits():
    for group in range(1, 17):
        sizes = (1, 1_048_576, 1_048_576, group, 1, 128, 128)
        end = int(choices(sizes, top_k=1024, rotate=False, backward=True)["masked_rows"])
        run = 2 ** (128 // group).bit_length() // 2  # tokens of two tiles of rows
        assert 2 * (end // run + 1) <= 2**16
        assert end // 128 <= 2**16


def test_masked_rows_need_strides_of_1_and_2_hopper_and_no_rotation():
    others = [
        {"rotate": True},
        {"selection_stride": 4},
        {"selection_stride": 16},
        *OTHERS.values(),
        {"per_query_gather": True},
        {"gathered": True},
    ]
    for backward in (False, True):
        for options in others:
            found = choices(**{"rotate": False, "backward": backward, **options})
            assert found["masked_rows"] == "0"
            assert "masked_rows" not in found.get("layers", "")
            assert "token_dQ" not in found
        assert choices(half=False, rotate=False, backward=backward)["masked_rows"] == "0"


def test_the_switch_for_masked_rows_changes_nothing_else():
    for stride in (1, 2, 4, 16):
        for backward in (False, True):
            here = {"selection_stride": stride, "backward": backward}
            assert choices(**here) == choices(**here, gathered=True)
            without = {**here, "rotate": False, "gathered": True}
            assert choices(**without) == choices(**here), "the kernels of rotated keys"
    gathered = choices(rotate=False, gathered=True)
    assert gathered["layers"] == "dense,shared_gather"
    assert gathered["dense_rows"] == "8192"


@pytest.mark.parametrize("stride", [1, 2])
def test_masked_rows_take_the_place_of_the_gather_at_the_tokens(stride):
    def found(length, queries, group=8):
        sizes = (1, length, queries, 4 * group, 4, 128, 128)
        return layers(sizes, selection_stride=stride, rotate=False)

    for queries in (9000, 64):
        assert found(9000, queries) == ["dense", "masked_rows"]
        assert found(32_768, queries) == ["dense", "masked_rows"]
    assert found(8192, 64) == ["dense_rows"]
    assert found(32_800, 32_800) == ["dense", "masked_rows|shared_gather"]
    assert found(32_832, 64) == ["dense", "shared_gather"]
    assert found(131_073, 131_073) == ["dense", "shared_gather", "masked_rows|shared_gather"]
    assert found(20_000, 20_000, group=6) == ["shared_gather", "masked_rows"]
    own = {"selection_stride": 2, "max_top_nodes": 127, "rotate": False}
    odd = layers((1, 127, 127, 32, 4, 128, 128), **own)
    assert odd == ["masked_rows"], "the one row behind the last whole list"


@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_masked_rows_take_the_place_of_the_gathers_at_the_tokens(stride):
    def found(length, queries, group=8, **options):
        sizes = (1, length, queries, 4 * group, 4, 128, 128)
        taken = choices(sizes, selection_stride=stride, rotate=False, backward=True, **options)
        return taken.get("token_dQ"), taken.get("token_dK_dV")

    for queries in (9000, 64):
        assert found(9000, queries) == ("masked_rows", "masked_rows")
        assert found(32_768, queries) == ("masked_rows", "masked_rows")
    assert found(8192, 64) == (None, None)
    assert found(32_832, 64) == (None, None)
    assert found(32_800, 32_800) == ("masked_rows|shared_gather", "masked_rows|parent_gradient")
    assert found(32_800, 32_800, group=16) == ("masked_rows|halves", "masked_rows|halves")
    odd = found(127, 127, max_top_nodes=127, top_k=8)
    row_behind_the_last_whole_list = (None, None) if stride == 1 else ("masked_rows", "masked_rows")
    assert odd == row_behind_the_last_whole_list


def test_masked_rows_leave_the_chunks_of_a_model_as_they_are():
    """The query side of a chunk fits into the memory of the partial sums of the top."""
    for length in (32_768, 131_072):
        sizes = (1, length, length, 32, 4, 128, 128)
        masked = choices(sizes, rotate=False, backward=True)
        gathered = choices(sizes, rotate=False, backward=True, gathered=True)
        assert masked["query_chunk"] == gathered["query_chunk"]


def gradients(
    sizes: tuple[int, ...] = MODEL, half: bool = True, top: bool = False, **options: int | bool
) -> tuple[str, str]:
    """The kernels of dQ and of dK and dV."""
    found = choices(sizes, half, backward=True, **options)
    return (found["top_dQ"], found["top_dK_dV"]) if top else (found["dQ"], found["dK_dV"])


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("length", [700, 32_768, 1_048_576])
def test_gradients_of_lists_with_many_rows_take_a_block(length, width):
    for group in (1, 2, 3, 4, 8, 16):
        for stride in (1, 2, 4, 8, 16):
            found = gradients((1, length, length, 2 * group, 2, width, width), selection_stride=stride)
            few = (
                "shared_gather" if group <= 8 else "per_query",
                "parent_gradient" if 4 <= group <= 8 else "key_gradient",
            )
            if group == 16 and length > 8192:  # else no row walks the tree
                few = ("halves", "halves")
            least = 64 if 4 <= group <= 8 else 32
            assert found == (("per_list", "per_list") if stride >= 4 and stride * group >= least else few)


@pytest.mark.parametrize("length", [700, 32_768, 1_048_576])
def test_gradients_of_the_top_take_a_block_of_neighbours(length):
    for group in (1, 2, 3, 4, 6, 8, 16):
        for stride in (1, 2, 4, 8, 16):
            sizes = (1, length, length, 2 * group, 2, 128, 128)
            found = gradients(sizes, top=True, selection_stride=stride)
            below = gradients(sizes, selection_stride=stride)
            by_list = group in (4, 8, 16) and below != ("halves", "halves")
            assert found == (("per_list", "per_list") if by_list else below)


@pytest.mark.parametrize(
    "options", [*OTHERS.values(), {"per_query_gather": True}], ids=[*OTHERS, "on_request"]
)
def test_other_gradients_are_made_for_each_query(options):
    for stride in (1, 16):
        for top in (False, True):
            of_parents = ("per_query", "parent_gradient")
            assert gradients(selection_stride=stride, top=top, **options) == of_parents
            of_keys = ("per_query", "key_gradient")
            one_head = (*MODEL[:3], 4, 4, *MODEL[5:])
            assert gradients(one_head, selection_stride=stride, top=top, **options) == of_keys
            assert gradients(MODEL, False, top, selection_stride=stride) == ("general", "general")


@pytest.mark.parametrize("length", [32_768, 131_072, 1_048_576])
@pytest.mark.parametrize(("stride", "share"), [(1, 800), (16, 272)])
def test_the_backward_keeps_to_its_scratch(length, stride, share):
    """The rows of a chunk fit into what the partial sums leave of 1856 MiB."""
    sizes = (1, length, length, 32, 4, 128, 128)
    queries = int(choices(sizes, selection_stride=stride, backward=True)["query_chunk"])
    records = 0 if stride == 16 else 2 * 256
    assert queries % stride == 0
    assert queries * 32 * (records + 4 * 128 + 16) <= share * 2**20


@pytest.mark.parametrize("num_sms", [132, 114, 78, 1])
@pytest.mark.parametrize("stride", [1, 3, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (64, 4), (16, 2), (24, 3)])
def test_chunks_of_blocks_are_whole_waves(heads, kv_heads, stride, num_sms):
    """The kernels per list run a task per SM and wave, and the tasks of a chunk fill whole waves."""
    if heads // kv_heads == 16 and stride < 4:  # its call has twice as many K/V heads
        kv_heads *= 2
    sizes = (1, 524_288, 524_288, heads, kv_heads, 128, 128)
    found = choices(sizes, selection_stride=stride, num_sms=num_sms, backward=True)
    assert found["top_dK_dV"] == "per_list"
    queries, run = int(found["query_chunk"]), stride if found["dK_dV"] == "per_list" else 16
    assert queries % stride == 0
    assert queries % run == 0
    assert queries < 524_288
    tasks = queries // run * -(-run * heads // kv_heads // 128) * kv_heads
    assert tasks % num_sms == 0


STEP = 4096  # queries of a piece


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("starts", [[2, 3], [0, 1, 2, 3], [4, 5, 6]])
def test_a_sequence_in_neighbouring_pieces_is_one_piece(starts, backward):
    sizes = (1, 131_072, len(starts) * STEP, 32, 4, 128, 128)
    found, expected = (
        choices(sizes, selection_stride=16, backward=backward, starts=[i * STEP for i in places])
        for places in (starts, starts[:1])
    )
    assert found == expected


@pytest.mark.parametrize(
    ("starts", "longest"),
    [([2, 3, 6], 2 * STEP), ([0, 4, 5, 6], 3 * STEP), ([0, 1, 2, 3, 7], 4 * STEP - 8192), ([3, 2], STEP)],
)
def test_chunks_fit_the_longest_run_of_neighbouring_pieces(starts, longest):
    sizes = (1, 131_072, len(starts) * STEP, 32, 4, 128, 128)
    for backward in (False, True):
        found = choices(sizes, selection_stride=16, backward=backward, starts=[i * STEP for i in starts])
        assert found["query_chunk"] == str(longest)


def score_times(rows: int, heads: int, tiles: int, block: int, parts: int) -> tuple[float, float]:
    """Of references and importances, in tiles of a block of 256 rows and with 5 tiles for the start of a block."""
    references = -(-(-(-rows // block) * heads) // 132) * (1 if block == 256 else 9 / 16)
    blocks = -(-rows // 256) * heads * parts
    return references, -(-blocks // 132) * (-(-tiles // parts) + 5)


@pytest.mark.parametrize("heads", [1, 4, 8, 64])
@pytest.mark.parametrize("rows", [8, 300, 512, 2048, 8448, 10_296, 94_000])
@pytest.mark.parametrize("tiles", [4, 31, 64])
def test_scores_of_few_lists_take_more_blocks(rows, heads, tiles):
    block, parts = host.tree_top_scores(rows, heads, tiles)
    assert block in (128, 256)
    assert parts in (1, 2, 4, 8)
    found = score_times(rows, heads, tiles, block, parts)
    plain = score_times(rows, heads, tiles, 256, 1)
    assert all(ours <= theirs for ours, theirs in zip(found, plain, strict=True))
    if -(-rows // 256) * heads <= 132 // 4 and tiles > 16:  # a quarter of a wave at most
        assert block == 128
        assert parts >= 4
    if -(-rows // 256) * heads % 132 == 0:
        assert (block, parts) == (256, 1), "whole waves stay"
