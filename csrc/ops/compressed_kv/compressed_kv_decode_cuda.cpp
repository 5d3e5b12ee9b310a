// CUDA entry point of decode attention: which kernel attends to which tokens, temporary memory and launches.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>

#include <limits>

#include "device/sizes.h"
#include "host/aligned.h"
#include "host/cuda/hopper.h"
#include "host/cuda/launch_scope.h"
#include "host/dispatch.h"
#include "ops/compressed_kv/compressed_kv.h"
#include "ops/compressed_kv/decode/decode_config.h"
#include "ops/compressed_kv/decode/decode_launch.h"
#include "ops/compressed_kv/decode/general.h"

namespace htree::compressed_kv {
namespace {

constexpr int64_t kGeneralStep = 64;  // a split of the general kernel is a multiple of so many tokens
constexpr int64_t kWindowSplit = 16;  // tokens of the window that a block takes: two per warp

RowsView view_of(const Compressed& from) {
  return {.bitmap = static_cast<const uint8_t*>(from.bitmap.const_data_ptr()),
          .values = from.values.const_data_ptr<uint8_t>(),
          .scales =
              from.format.quantised() ? static_cast<const uint16_t*>(from.scales.const_data_ptr()) : nullptr,
          .keep = from.format.keep,
          .row_bytes = from.format.row_bytes()};
}

QueryType query_type_of(const at::Tensor& q) {
  return q.scalar_type() == at::kHalf       ? QueryType::kHalf
         : q.scalar_type() == at::kBFloat16 ? QueryType::kBfloat16
                                            : QueryType::kFloat;
}

RowKind packed_kind(int bits, QueryType type) {
  return bits == 4                      ? RowKind::kNibbles
         : bits == 8                    ? RowKind::kBytes
         : type == QueryType::kBfloat16 ? RowKind::kPackedBfloat16
                                        : RowKind::kPackedHalf;
}

RowKind dense_kind(QueryType type) {
  return type == QueryType::kHalf       ? RowKind::kHalf
         : type == QueryType::kBfloat16 ? RowKind::kBfloat16
                                        : RowKind::kFloat;
}

const int32_t* lengths_of(const OptionalTensor& lengths) {
  return lengths.has_value() ? lengths->const_data_ptr<int32_t>() : nullptr;
}

void check_launch(cudaError_t error) {
  TORCH_CHECK_NOT_IMPLEMENTED(error != cudaErrorNotSupported,
                              "kv_decode_attention: this device has too little shared memory per block");
  C10_CUDA_CHECK(error);
}

// How the tokens are split, and which kernel attends to them.
struct Schedule {
  int64_t head_chunks;  // blocks for the query heads of one kv head
  int64_t num_groups;   // B * H_kv * head_chunks
  bool tiles;           // the tensor-core kernel attends to the compressed part
  bool fused;           // and to the window as well
  int64_t split_size;
  int64_t num_splits;
  int64_t window_share;  // tokens of the window that a split takes
  int64_t num_parts;
  Ending ending;
};

Schedule schedule_of(const DecodeProblem& p, QueryType type, int k_bits, int v_bits) {
  const int num_processors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  const ClusterCounts& clusters = clusters_at_once();
  Schedule s{};
  s.head_chunks = ceil_div(p.heads_per_kv(), kHeadsPerBlock);
  s.num_groups = p.batch * p.num_kv_heads * s.head_chunks;
  // Queries of half types with one slot go to the tensor cores, where pages hold whole tiles, a kernel takes the
  // size of the heads, and their number fits the grid.
  s.tiles = type != QueryType::kFloat && p.hadamard_group <= 1 && p.page % kTileRows == 0 &&
            p.key_dim == p.value_dim && p.key_dim <= kMostTileHeadDim && p.num_kv_heads <= kMostTileGrid &&
            s.head_chunks <= kMostTileGrid;
  // A split size that the caller gave is rounded up to a multiple of 16, which tiles need.
  const bool given = p.split_size > 0;
  const SplitChoice choice = given     ? SplitChoice{ceil_div(p.split_size, kTileRows) * kTileRows, false}
                             : s.tiles ? choose_split_size(p.capacity, s.num_groups, num_processors,
                                                           kTileStep, tile_costs(k_bits, v_bits), clusters)
                                       : choose_split_size(p.capacity, s.num_groups, 4 * num_processors,
                                                           kGeneralStep, kGeneralCosts, {});
  s.split_size = choice.size;
  s.num_splits = ceil_div(p.capacity, s.split_size);
  // The tensor-core kernel attends to the window as well, which is dealt to its splits.
  s.window_share = s.num_splits > 0 ? ceil_div(p.window, s.num_splits) : 0;
  s.fused = s.tiles && s.num_splits > 0 && s.window_share <= kMostWindowTokens;
  // Where the caller fixes the size, other sequences must not decide how its splits are merged.
  const bool cluster = given ? runs_as_cluster(s.num_splits, clusters) : choice.cluster;
  s.ending = s.fused && s.num_splits == 1 ? Ending::kResult
             : s.fused && cluster         ? Ending::kCluster
                                          : Ending::kParts;
  s.num_parts = s.num_splits + (s.fused ? 0 : ceil_div(p.window, kWindowSplit));
  return s;
}

// Tiles are copied in chunks of 16 bytes that may start before their first row, but not before the tensor.
Compressed aligned(const Compressed& x) {
  return {x.format, aligned_contiguous(x.bitmap), aligned_contiguous(x.values), aligned_contiguous(x.scales)};
}
DecodeTensors aligned(const DecodeTensors& t) {
  return {t.q,        aligned(t.k), aligned(t.v), aligned_contiguous(t.k_win), aligned_contiguous(t.v_win),
          t.comp_len, t.win_len,    t.block_table};
}

DecodeParams params_of(const DecodeProblem& p, const DecodeTensors& t, const Schedule& s,
                       const at::Tensor& out, const at::Tensor& lse) {
  constexpr double kLog2E = 1.4426950408889634;
  const QueryType type = query_type_of(t.q);
  return {.q = {t.q.const_data_ptr(), type},
          .k = view_of(t.k),
          .v = view_of(t.v),
          .num_rows = t.k.bitmap.numel() / t.k.format.words(),
          .num_queries = p.batch * p.num_heads,
          .tables = {.comp_len = lengths_of(t.comp_len), .block_table = lengths_of(t.block_table)},
          .parts = {},
          .capacity = p.capacity,
          .split_size = s.split_size,
          .heads = {.query = static_cast<int>(p.num_heads),
                    .kv = static_cast<int>(p.num_kv_heads),
                    .chunks = static_cast<int>(s.head_chunks),
                    .queries = static_cast<int>(p.num_queries)},
          .pages = {.tokens = static_cast<int>(p.page),
                    .per_sequence = static_cast<int>(p.max_pages),
                    .all = static_cast<int>(p.num_pages)},
          .splits = {.launched = static_cast<int>(s.num_splits),
                     .parts = static_cast<int>(s.num_parts),
                     .first_part = 0},
          .num_slots = std::max(1, p.hadamard_group),
          .score_scale = static_cast<float>(p.scale * kLog2E),
          .window = {.k = t.k_win.const_data_ptr(),
                     .v = t.v_win.const_data_ptr(),
                     .len = lengths_of(t.win_len),
                     .capacity = static_cast<int>(p.window),
                     .per_split = s.fused ? static_cast<int>(s.window_share) : 0,
                     .bfloat16 = type == QueryType::kBfloat16},
          .output = {.ending = s.ending,
                     .out = out.mutable_data_ptr(),
                     .lse = lse.mutable_data_ptr<float>(),
                     .type = type},
          .most_pdl_blocks = most_pdl_blocks()};
}

// The window's tokens for the general kernel; its parts come after those of the compressed part.
GeneralParams window_params(const DecodeProblem& p, const DecodeTensors& t, const Schedule& s,
                            const DecodeParams& d) {
  const RowKind kind = dense_kind(d.output.type);
  GeneralParams window{d, t.k_win.const_data_ptr(), t.v_win.const_data_ptr(), kind, kind, p.key_dim};
  window.base.tables.comp_len = lengths_of(t.win_len);
  window.base.capacity = p.window;
  window.base.split_size = kWindowSplit;
  window.base.splits.launched = static_cast<int>(s.num_parts - s.num_splits);
  window.base.splits.first_part = static_cast<int>(s.num_splits);
  return window;
}

}  // namespace

void decode_cuda(const DecodeProblem& p, const DecodeTensors& given, const at::Tensor& out,
                 const at::Tensor& lse) {
  const LaunchScope scope(given.q);
  const cudaStream_t stream = scope.stream();
  const int k_bits = given.k.format.bits, v_bits = given.v.format.bits;
  const QueryType type = query_type_of(given.q);
  const Schedule s = schedule_of(p, type, k_bits, v_bits);
  if (s.num_parts == 0) {
    out.zero_();
    lse.fill_(-std::numeric_limits<float>::infinity());
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(s.num_groups * s.num_parts <= std::numeric_limits<int32_t>::max(),
                              "kv_decode_attention: ", s.num_groups, " groups of heads times ", s.num_parts,
                              " splits are more than 2^31 blocks");
  const DecodeTensors t = aligned(given);
  DecodeParams d = params_of(p, t, s, out, lse);
  const auto floats = t.q.options().dtype(at::kFloat);
  at::Tensor acc, stats, transformed;
  if (s.ending == Ending::kParts) {
    acc = at::empty({d.num_queries, s.num_parts, p.value_dim}, floats);
    stats = at::empty({2, d.num_queries, s.num_parts}, floats);
    float* const max = stats.mutable_data_ptr<float>();
    d.parts = {.acc = acc.mutable_data_ptr<float>(), .max = max, .sum = max + stats.numel() / 2};
  }
  if (p.hadamard_group > 0) {
    transformed = at::empty({d.num_slots, d.num_queries, p.key_dim}, floats);
    dispatch_int<64, 128, 256, 512>("kv_decode_attention", "D of transformed keys", p.key_dim,
                                    [&](auto key_dim) {
                                      check_launch(launch_transform_query<decltype(key_dim)::value>(
                                          d, d.num_queries, transformed.mutable_data_ptr<float>(), stream));
                                    });
    d.q = {transformed.const_data_ptr(), QueryType::kFloat};
  }
  if (s.num_splits > 0 && s.tiles) {
    dispatch_int<64, 128, 192, 256>("kv_decode_attention", "D", p.key_dim, [&](auto head_dim) {
      dispatch_int<4, 8, 16>("kv_decode_attention", "k_bits", k_bits, [&](auto key_bits) {
        check_launch(launch_decode_keys<decltype(head_dim)::value, decltype(key_bits)::value>(
            d, v_bits, type, s.num_groups, stream));
      });
    });
  }
  dispatch_int<64, 128, 192, 256, 320, 384, 448, 512>(
      "kv_decode_attention", "D of values", p.value_dim, [&](auto head_dim) {
        constexpr int kValueDim = decltype(head_dim)::value;
        if (s.num_splits > 0 && !s.tiles) {
          const GeneralParams general{
              d, nullptr, nullptr, packed_kind(k_bits, type), packed_kind(v_bits, type), p.key_dim};
          check_launch(launch_general<kValueDim>(general, s.num_groups, stream));
        }
        if (p.window > 0 && !s.fused) {
          check_launch(launch_general<kValueDim>(window_params(p, t, s, d), s.num_groups, stream));
        }
        if (s.ending == Ending::kParts) {
          check_launch(launch_merge<kValueDim>(d, d.num_queries, stream));
        }
      });
}

}  // namespace htree::compressed_kv
