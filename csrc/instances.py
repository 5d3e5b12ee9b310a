"""What the library compiles beside the sources in csrc: template instances and instruction sets, one table per family.

A kernel template is compiled for many types and sizes, and a CPU loop for several instruction sets. Each of them is a
small file of its own, so that the compiler works on many at once; where it works on few, the instances of a kernel
share one, because most of the time of a small file is its headers'. ``setup.py`` writes these files into
``build/generated`` from the tables below; a file does nothing but include the header that is named here and instantiate
what it defines, so an error points at that header. ``python csrc/instances.py FOLDER`` writes them anywhere.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Type:
    """A storage type: ``name`` in file names, ``cpp`` in code."""

    name: str
    cpp: str


HALF = Type("half", "__half")
BFLOAT16 = Type("bfloat16", "__nv_bfloat16")
FLOAT = Type("float", "float")
DOUBLE = Type("double", "double")
HALF_TYPES = (HALF, BFLOAT16)
FLOAT_TYPES = (FLOAT, HALF, BFLOAT16)
ALL_TYPES = (FLOAT, HALF, BFLOAT16, DOUBLE)


@dataclass(frozen=True)
class Cuda:
    """One .cu file for each combination of the values in ``over``, or one for all of them.

    ``{T}`` in ``code`` is the type's name in C++, in ``file`` its name for people; a number stands for itself.

    Attributes:
        file: name of the file without its suffix, unique within the library.
        header: defines what is instantiated; a path below csrc.
        code: the launchers to instantiate, without the error that they return and the stream that they take last.
        over: values of each placeholder.
    """

    file: str
    header: str
    code: Sequence[str]
    over: Mapping[str, Sequence[Type | int]] = field(default_factory=dict)

    def files(self, namespace: str, merged: bool) -> Iterator[tuple[str, str]]:
        """Name and text of each file."""
        found = []
        for values in itertools.product(*self.over.values()):
            chosen = dict(zip(self.over, values, strict=True))
            names = {key: v.name if isinstance(v, Type) else v for key, v in chosen.items()}
            codes = {key: v.cpp if isinstance(v, Type) else v for key, v in chosen.items()}
            lines = [
                f"template cudaError_t {line[:-1].format(**codes)}, cudaStream_t);" for line in self.code
            ]
            found.append((self.file.format(**names), lines))
        if merged:
            found = [
                (
                    self.file.format(**dict.fromkeys(self.over, "all")),
                    [x for _, lines in found for x in lines],
                )
            ]
        for name, lines in found:
            yield f"{name}.cu", source_text(namespace, f'#include "{self.header}"\n', lines)


@dataclass(frozen=True)
class InstructionSets:
    """The CPU loops of ``headers``, compiled for the baseline, AVX2 and AVX-512 (csrc/host/cpu/isa.h).

    Attributes:
        file: name of the files without instruction set and suffix.
        headers: the loops, in the order in which they are included.
        table: definition of the table of functions; ``{isa}`` is Baseline, Avx2 or Avx512. It is constexpr: code that
            filled it at import would be of an instruction set that the CPU may lack.
    """

    file: str
    headers: Sequence[str]
    table: str

    def files(self, namespace: str, merged: bool) -> Iterator[tuple[str, str]]:
        """Name and text of each file. They are never merged: a file is of one instruction set."""
        for isa in ("Baseline", "Avx2", "Avx512"):
            lines = [f"#define HTREE_{isa.upper()}"]
            lines += [f'#include "{header}"' for header in ("host/cpu/simd.h", *self.headers)]
            text = source_text(namespace, "\n".join(lines) + "\n", [f"{self.table.format(isa=isa)};"])
            if isa != "Baseline":
                text = f"#if defined(__x86_64__)\n{text}#endif\n"
            yield f"{self.file}_{isa.lower()}.cpp", text


def source_text(namespace: str, includes: str, lines: list[str]) -> str:
    body = "\n".join(lines)
    return (
        f"// Written by setup.py from csrc/instances.py.\n{includes}\n"
        f"namespace htree::{namespace} {{\n{body}\n}}  // namespace htree::{namespace}\n"
    )


Table = Sequence[Cuda | InstructionSets]


def row_kernels(file: str, *headers: str) -> InstructionSets:
    """A table of row kernels: ``headers`` define ``row_kernels()``."""
    return InstructionSets(file, headers, "constexpr RowKernels kRowKernels{isa} = HTREE_ISA::row_kernels()")


CAUSAL_SOFTMAX: Table = [
    Cuda(
        "causal_softmax_{T}",
        "ops/causal_softmax/causal_softmax_launch.cuh",
        [
            "launch_forward<{T}>(const KernelConfig&, const ForwardParams<{T}>&)",
            "launch_backward<{T}>(const KernelConfig&, const BackwardParams<{T}>&)",
        ],
        {"T": ALL_TYPES},
    ),
    row_kernels("causal_softmax_rows", "ops/causal_softmax/causal_softmax_rows_impl.h"),
]

# Of keys and values; the kernel for tiles takes the smaller ones, and transformed queries are powers of two.
HEAD_SIZES = tuple(range(64, 513, 64))
TILE_HEAD_SIZES = (64, 128, 192, 256)

COMPRESSED_KV: Table = [
    Cuda(
        "compress_{T}",
        "ops/compressed_kv/compress/compress_launch.cuh",
        [
            "launch_compress<{T}>(const CompressParams&)",
            "launch_decompress<{T}>(const DecompressParams&)",
        ],
        {"T": FLOAT_TYPES},
    ),
    Cuda(
        "decode_d{D}_keys{K}",
        "ops/compressed_kv/decode/decode_launch.cuh",
        ["launch_decode_keys<{D}, {K}>(const DecodeParams&, int, QueryType, int64_t)"],
        {"D": TILE_HEAD_SIZES, "K": (4, 8, 16)},
    ),
    Cuda(
        "decode_general_d{D}",
        "ops/compressed_kv/decode/general.cuh",
        [
            "launch_general<{D}>(const GeneralParams&, int64_t)",
            "launch_merge<{D}>(const DecodeParams&, int64_t)",
        ],
        {"D": HEAD_SIZES},
    ),
    Cuda(
        "decode_transform_query",
        "ops/compressed_kv/decode/general.cuh",
        [
            f"launch_transform_query<{size}>(const DecodeParams&, int64_t, float*)"
            for size in (64, 128, 256, 512)
        ],
    ),
    row_kernels("rows", "ops/compressed_kv/rows_impl.h"),
]

FP8: Table = [
    Cuda(
        "gemm_{T}",
        "ops/fp8/gemm/cuda/gemm_launch.cuh",
        [
            "launch_gemm_tile(const GemmParams<{T}>&, const GemmConfig&)",
            "launch_gemm_stream(const GemmParams<{T}>&, const GemmConfig&)",
        ],
        {"T": FLOAT_TYPES},
    ),
    Cuda(
        "quantize_{T}",
        "ops/fp8/quantize/quantize_launch.cuh",
        [
            "launch_quantize<{T}>(const QuantizeArgs<{T}>&)",
            "launch_dequantize<{T}>(const ApplyArgs<uint8_t, {T}>&)",
            "launch_fake_backward<{T}>(const ApplyArgs<{T}, {T}>&)",
        ],
        {"T": FLOAT_TYPES},
    ),
    InstructionSets(
        "gemm_rows",
        ["ops/fp8/gemm/cpu/gemm_rows_impl.h"],
        "constexpr GemmKernels kGemmKernels{isa} = HTREE_ISA::gemm_kernels()",
    ),
    row_kernels("quantize_rows", "ops/fp8/quantize/quantize_rows_impl.h"),
]

GATED_MLP: Table = [
    Cuda(
        "gated_mlp_tile_{T}",
        "ops/gated_mlp/cuda/gated_mlp_launch.cuh",
        ["launch_tile(const ForwardParams<{T}>&, const KernelConfig&)"],
        {"T": HALF_TYPES},
    ),
    Cuda(
        "gated_mlp_swap_ab_{T}",
        "ops/gated_mlp/cuda/gated_mlp_launch.cuh",
        ["launch_swap_ab(const ForwardParams<{T}>&, const KernelConfig&)"],
        {"T": HALF_TYPES},
    ),
    Cuda(
        "gated_mlp_stream_{T}",
        "ops/gated_mlp/cuda/gated_mlp_launch.cuh",
        ["launch_stream(const ForwardParams<{T}>&, const KernelConfig&)"],
        {"T": HALF_TYPES},
    ),
    Cuda(
        "gated_mlp_gradient_{T}",
        "ops/gated_mlp/cuda/gated_mlp_launch.cuh",
        [
            "launch_input_gradient(const InputGradientParams<{T}>&)",
            "launch_weight_gradients(const WeightGradientParams<{T}>&)",
        ],
        {"T": HALF_TYPES},
    ),
    Cuda(
        "gated_mlp_gate_{T}",
        "ops/gated_mlp/cuda/gated_mlp_launch.cuh",
        [
            "launch_gate(Activation, int64_t, const float*, const float*, {T}*)",
            "launch_gate_backward(Activation, int64_t, const {T}*, const float*, const float*, {T}*, {T}*)",
        ],
        {"T": FLOAT_TYPES},
    ),
    # the backward from products that the forward kept
    Cuda(
        "gated_mlp_gate_backward_{T}",
        "ops/gated_mlp/cuda/gated_mlp_launch.cuh",
        ["launch_gate_backward(Activation, int64_t, const {T}*, const {T}*, const {T}*, {T}*, {T}*)"],
        {"T": HALF_TYPES},
    ),
    row_kernels("gated_mlp_rows", "ops/gated_mlp/cpu/gated_mlp_rows_impl.h"),
    InstructionSets(
        "gated_mlp_products",
        ["ops/gated_mlp/cpu/gated_mlp_products_impl.h"],
        "constexpr ProductKernels kProductKernels{isa} = HTREE_ISA::product_kernels()",
    ),
]

HADAMARD: Table = [
    Cuda(
        "hadamard_short_{T}",
        "ops/hadamard/hadamard_launch.cuh",
        ["launch_short<{T}>(const Params<{T}>&)"],
        {"T": ALL_TYPES},
    ),
    Cuda(
        "hadamard_long_{T}",
        "ops/hadamard/hadamard_launch.cuh",
        ["launch_long<{T}>(const Params<{T}>&)"],
        {"T": ALL_TYPES},
    ),
    Cuda(
        "hadamard_join_halves",
        "ops/hadamard/hadamard_launch.cuh",
        ["launch_join_halves<double>(const Params<double>&)"],
    ),
    row_kernels("hadamard_rows", "ops/hadamard/hadamard_rows_impl.h"),
]

RMSNORM_ROPE: Table = [
    Cuda(
        "rmsnorm_rope_forward_{T}",
        "ops/rmsnorm_rope/rmsnorm_rope_launch.cuh",
        ["launch_forward<{T}>(const KernelConfig&, const ForwardParams<{T}>&, int, bool)"],
        {"T": ALL_TYPES},
    ),
    Cuda(
        "rmsnorm_rope_backward_{T}",
        "ops/rmsnorm_rope/rmsnorm_rope_launch.cuh",
        ["launch_backward<{T}>(const KernelConfig&, const BackwardParams<{T}>&, int)"],
        {"T": ALL_TYPES},
    ),
    Cuda(
        "rmsnorm_rope_sum",
        "ops/rmsnorm_rope/rmsnorm_rope_launch.cuh",
        [
            "launch_sum<float>(const SumParams<float>&)",
            "launch_sum<double>(const SumParams<double>&)",
        ],
    ),
    row_kernels("rmsnorm_rope_rows", "ops/rmsnorm_rope/rmsnorm_rope_rows_impl.h"),
]

FULL = Type("full", "FullWork")
IO_ONLY = Type("io", "IoOnly")
HEAD_DIMS = (32, 64, 128)
TENSOR_CORE: Mapping[str, Sequence[Type | int]] = {"T": HALF_TYPES, "D": HEAD_DIMS}


def instance_name(header: str) -> str:
    """``sparse_attention/cuda/sm90/forward/per_list/attend.cuh`` is sparse_attention_forward_per_list_attend."""
    return re.sub(r"/cuda/sm\d+/", "/", Path(header).with_suffix("").as_posix()).replace("/", "_")


def tensor_core(header: str, *launchers: str) -> Cuda:
    """Launchers of the tensor-core kernels of a header, given as ``name(Params)``: a file per type and head dim."""
    code = []
    for launcher in launchers:
        name, params = launcher.rstrip(")").split("(")
        code.append(f"{name}<{{T}}, {{D}}>(const {params}&)")
    return Cuda(instance_name(header) + "_{T}_d{D}", f"ops/{header}", code, TENSOR_CORE)


def tensor_core_copy(header: str, *launchers: str) -> Cuda:
    """The same for kernels that only copy: all types and head dims in one file."""
    one = tensor_core(header, *launchers)
    code = [line.format(T=dtype.cpp, D=dim) for line in one.code for dtype in HALF_TYPES for dim in HEAD_DIMS]
    return Cuda(instance_name(header), one.header, code)


TREE_ATTENTION: Table = [
    # the stages one by one
    Cuda(
        "tree_build",
        "ops/tree/cuda/any/tree_build.cuh",
        [
            f"{name}(const TreeBuildParams<{dtype.cpp}>&)"
            for name in ("launch_tree_build", "launch_tree_build_backward")
            for dtype in ALL_TYPES
        ],
    ),
    Cuda(
        "rope",
        "ops/tree/cuda/any/rope.cuh",
        [
            *(f"launch_rope(const RopeParams<{x.cpp}, float>&)" for x in FLOAT_TYPES),
            "launch_rope(const RopeParams<double, double>&)",
        ],
    ),
    Cuda(
        "{W}_compute_scores_{T}",
        "ops/selection/cuda/any/compute_scores.cuh",
        ["launch_compute_scores<{W}>(const ScoresParams<{T}>&)"],
        {"W": (FULL, IO_ONLY), "T": FLOAT_TYPES},
    ),
    Cuda(
        "compute_span_scores_{T}",
        "ops/selection/cuda/any/compute_scores.cuh",
        ["launch_compute_span_scores(const ComputeSpanScoresParams<{T}>&)"],
        {"T": FLOAT_TYPES},
    ),
    Cuda(
        "{W}_select_topk",
        "ops/selection/cuda/any/select_topk.cuh",
        ["launch_select_topk<{W}>(const SelectParams&)"],
        {"W": (FULL, IO_ONLY)},
    ),
    Cuda(
        "next_parents",
        "ops/selection/cuda/any/next_parents.cuh",
        [f"launch_compute_next_parents<{work.cpp}>(const NextParentsParams&)" for work in (FULL, IO_ONLY)],
    ),
    Cuda(
        "block_scores_{T}",
        "ops/selection/cuda/any/block_scores.cuh",
        ["launch_block_scores(const BlockScoreParams<{T}>&)"],
        {"T": FLOAT_TYPES},
    ),
    Cuda(
        "block_unit_scores_{T}",
        "ops/selection/cuda/sm80/block_unit_scores.cuh",
        ["launch_block_unit_scores(const BlockScoreParams<{T}>&)"],
        {"T": HALF_TYPES},
    ),
    Cuda(
        "accumulate_{T}",
        "ops/sparse_attention/cuda/any/accumulate.cuh",
        ["launch_accumulate(const AccumulateParams<{T}>&)"],
        {"T": FLOAT_TYPES},
    ),
    Cuda(
        "merge",
        "ops/sparse_attention/cuda/any/merge.cuh",
        [
            f"{name}<{dtype.cpp}>&)"
            for name in (
                "launch_final_normalize(const NormalizeParams",
                "launch_subtract_topk(const SubtractParams",
            )
            for dtype in FLOAT_TYPES
        ],
    ),
    # the whole operator on tensor cores
    tensor_core_copy("tree/cuda/sm80/packed_layer.cuh", "launch_pack_layer(PackParams)"),
    tensor_core_copy("tree/cuda/sm90/dense_layer.cuh", "launch_dense_layer(DenseLayerParams)"),
    tensor_core_copy(
        "tree/cuda/sm90/span_copies.cuh",
        "launch_pack_spans(SpanCopyParams)",
        "launch_tile_spans(SpanCopyParams)",
    ),
    tensor_core("selection/cuda/sm80/list_scores.cuh", "launch_list_scores(ListScoreParams)"),
    tensor_core("selection/cuda/sm80/span_list_scores.cuh", "launch_span_list_scores(ListScoreParams)"),
    tensor_core("selection/cuda/sm90/span_scores.cuh", "launch_span_scores(SpanScoreParams)"),
    tensor_core(
        "selection/cuda/sm90/dense_selection.cuh",
        "launch_dense_references(DenseReferenceParams)",
        "launch_dense_importances(DenseImportanceParams)",
    ),
    tensor_core(
        "sparse_attention/cuda/sm90/forward/dense_top/attend.cuh", "launch_dense_attend(DenseAttendParams)"
    ),
    tensor_core(
        "sparse_attention/cuda/sm90/forward/dense_rows/attend.cuh", "launch_dense_rows(DenseAttendParams)"
    ),
    tensor_core(
        "sparse_attention/cuda/sm90/forward/masked_rows/attend.cuh", "launch_masked_rows(MaskedAttendParams)"
    ),
    tensor_core(
        "sparse_attention/cuda/sm80/forward/per_query/attend.cuh", "launch_per_query_attend(AttendParams)"
    ),
    tensor_core(
        "sparse_attention/cuda/sm90/forward/shared_gather/attend.cuh",
        "launch_shared_gather_attend(AttendParams)",
    ),
    tensor_core(
        "sparse_attention/cuda/sm90/forward/per_list/attend.cuh", "launch_per_list_attend(AttendParams)"
    ),
    Cuda(
        "backward_gradient_rows_{T}",
        "ops/sparse_attention/cuda/sm80/backward/gradient_rows.cuh",
        [
            f"{name}<{{T}}, {dim}>(const {params})"
            for dim in HEAD_DIMS
            for name, params in (
                ("launch_gradient_rows", "RowParams&"),
                ("launch_key_bounds", "PackParams&, const LayerBounds&"),
            )
        ],
        {"T": HALF_TYPES},
    ),
    tensor_core(
        "sparse_attention/cuda/sm80/backward/per_query/query_gradient.cuh",
        "launch_query_gradient(QueryGradientParams)",
    ),
    tensor_core(
        "sparse_attention/cuda/sm90/backward/shared_gather/query_gradient.cuh",
        "launch_shared_gather_gradient(SharedGatherGradientParams)",
    ),
    tensor_core(
        "sparse_attention/cuda/sm80/backward/per_parent/key_gradient.cuh",
        "launch_key_gradient(KeyGradientParams)",
    ),
    tensor_core(
        "sparse_attention/cuda/sm80/backward/per_parent/parent_gradient.cuh",
        "launch_parent_gradient(KeyGradientParams)",
    ),
    tensor_core_copy(
        "sparse_attention/cuda/sm90/backward/dense_rows/rows.cuh", "launch_row_tiles(DenseGradientParams)"
    ),
    tensor_core(
        "sparse_attention/cuda/sm90/backward/dense_rows/query_gradient.cuh",
        "launch_dense_query_gradient(DenseGradientParams)",
    ),
    tensor_core(
        "sparse_attention/cuda/sm90/backward/dense_rows/key_gradient.cuh",
        "launch_dense_key_gradient(DenseGradientParams)",
    ),
    tensor_core(
        "sparse_attention/cuda/sm90/backward/masked_rows/gradients.cuh",
        "launch_masked_row_tiles(MaskedGradientParams)",
        "launch_masked_query_gradient(MaskedGradientParams)",
        "launch_masked_key_gradient(MaskedGradientParams)",
    ),
    tensor_core(
        "sparse_attention/cuda/sm90/backward/per_list/gradient.cuh",
        "launch_per_list_gradient(PerListGradientParams)",
    ),
    tensor_core(
        "sparse_attention/cuda/sm90/backward/per_list/partial_sum.cuh",
        "launch_partial_sums(PartialSumParams)",
    ),
    # the backward of every dtype and shape
    Cuda(
        "general_gradient_{T}",
        "ops/sparse_attention/cuda/any/general_gradient.cuh",
        [
            "launch_general_delta<{T}>(const GeneralGradientParams&)",
            "launch_general_query_gradient<{T}>(const GeneralGradientParams&, const GeneralQueryGradient&)",
            "launch_general_key_gradient<{T}>(const GeneralGradientParams&, const GeneralKeyGradient&)",
        ],
        {"T": FLOAT_TYPES},
    ),
    InstructionSets(
        "block_rows",
        ["ops/selection/cpu/block_rows_impl.h"],
        "constexpr BlockTables kBlockTables{isa} = HTREE_ISA::blocks::block_tables()",
    ),
    InstructionSets(
        "stage_rows",
        ["ops/sparse_attention/cpu/stage_rows_impl.h"],
        "constexpr StageTables kStageTables{isa} = HTREE_ISA::stage_tables()",
    ),
    InstructionSets(
        "query_kernels",
        ["ops/sparse_attention/cpu/query_kernels_impl.h"],
        "constexpr QueryKernels<float> kQueryKernels{isa} = HTREE_ISA::query::query_kernels<float>()",
    ),
]

NODES = Type("nodes", "false")
SPANS = Type("spans", "true")

TREE_CACHE: Table = [
    Cuda(
        "tree_cache_append",
        "ops/tree_cache/append.cuh",
        [f"launch_append(const AppendParams<{dtype.cpp}>&)" for dtype in FLOAT_TYPES],
    ),
    Cuda(
        "tree_cache_append_packed",
        "ops/tree_cache/packed/append_packed.cuh",
        [f"launch_append_packed(const AppendPackedParams<{dtype.cpp}>&)" for dtype in FLOAT_TYPES],
    ),
    Cuda(
        "tree_cache_page_copies",
        "ops/tree_cache/prompt/page_copies.cuh",
        [
            f"launch_page_copy<{dtype.cpp}, {dim}>(const PageCopy<{target}>&)"
            for target in ("ParentTarget", "TileTarget", "ParentSpanTarget", "TileSpanTarget")
            for dtype in HALF_TYPES
            for dim in HEAD_DIMS
        ],
    ),
    Cuda(
        "tree_cache_attend_{T}",
        "ops/tree_cache/attend.cuh",
        [
            f"{name}(const AttendParams<{{T}}>&)"
            for name in ("launch_rows", "launch_top_lists", "launch_store_ring", "launch_attend")
        ],
        {"T": FLOAT_TYPES},
    ),
    Cuda(
        "tree_cache_decode_{T}_d{D}_{S}",
        "ops/tree_cache/decode/sm90/decode.cuh",
        ["launch_decode<{T}, {D}, {S}>(const AttendParams<{T}>&, const DecodePlans&)"],
        {"T": HALF_TYPES, "D": (64, 128), "S": (NODES, SPANS)},
    ),
    Cuda(
        "tree_cache_decode_packed_{T}_d{D}_{S}",
        "ops/tree_cache/decode/sm90/decode.cuh",
        ["launch_decode_packed<{T}, {D}, {S}>(const AttendParams<{T}>&, const DecodePlans&)"],
        {"T": HALF_TYPES, "D": (64, 128), "S": (NODES, SPANS)},
    ),
    Cuda(
        "tree_cache_listed_{T}",
        "ops/tree_cache/decode/listed.cuh",
        [f"launch_listed<{{T}}, {dim}>(const AttendParams<{{T}}>&, int64_t, bool)" for dim in (64, 128)],
        {"T": HALF_TYPES},
    ),
    Cuda(
        "tree_cache_top_spans_{T}",
        "ops/tree_cache/decode/sm90/top_spans.cuh",
        [f"launch_top_spans<{{T}}, {dim}>(const AttendParams<{{T}}>&, int)" for dim in (64, 128)],
        {"T": HALF_TYPES},
    ),
]

INDEX_LOSS: Table = [
    Cuda(
        "general_masses_{T}",
        "ops/index_loss/cuda/any/general_masses.cuh",
        [f"launch_general_masses<{{T}}, {masses}>(const MassParams<{{T}}>&)" for masses in ("false", "true")],
        {"T": FLOAT_TYPES},
    ),
    Cuda(
        "tensor_masses_{T}",
        "ops/index_loss/cuda/sm80/tensor_masses.cuh",
        [f"launch_tensor_masses<{{T}}, {masses}>(const MassParams<{{T}}>&)" for masses in ("false", "true")],
        {"T": HALF_TYPES},
    ),
    Cuda(
        "index_scores_{T}",
        "ops/index_loss/cuda/any/index_scores.cuh",
        ["launch_index_scores(const ScoreParams<{T}>&)"],
        {"T": FLOAT_TYPES},
    ),
    Cuda(
        "index_gradients_{T}",
        "ops/index_loss/cuda/any/gradients.cuh",
        [
            "launch_row_gradients(const GradientParams<{T}>&)",
            "launch_key_gradient(const KeyGradientParams<{T}>&)",
            "launch_query_gradient(const QueryGradientParams<{T}>&)",
        ],
        {"T": FLOAT_TYPES},
    ),
    InstructionSets(
        "index_rows",
        ["ops/index_loss/index_rows_impl.h"],
        "constexpr IndexTables kIndexTables{isa} = HTREE_ISA::index_loss_rows::index_tables()",
    ),
]

# Family, which is also the namespace, to its table.
FAMILIES: dict[str, Table] = {
    "causal_softmax": CAUSAL_SOFTMAX,
    "compressed_kv": COMPRESSED_KV,
    "fp8": FP8,
    "gated_mlp": GATED_MLP,
    "hadamard": HADAMARD,
    "index_loss": INDEX_LOSS,
    "rmsnorm_rope": RMSNORM_ROPE,
    "tree_attention": TREE_ATTENTION,
    "tree_cache": TREE_CACHE,
}


def texts(merged: bool = False) -> dict[str, str]:
    """Every file as ``family/name``, with its text; ``merged``: the instances of a kernel share one."""
    found: dict[str, str] = {}
    for family, table in FAMILIES.items():
        for entry in table:
            for name, text in entry.files(family, merged):
                if f"{family}/{name}" in found:
                    raise ValueError(f"csrc/instances.py: {family}/{name} is made twice")
                found[f"{family}/{name}"] = text
    return found


def write(folder: Path, wanted: Mapping[str, str]) -> list[Path]:
    """Makes ``folder`` hold exactly the files of ``wanted``; files that are right already keep their dates."""
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in wanted:
            path.unlink()
    for name, text in wanted.items():
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return [folder / name for name in wanted]


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    for written in write(Path(sys.argv[1]), texts()):
        print(written)
