// CUDA entry point of decode attention: which kernel attends to which tokens, temporary memory, launches.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>

#include <limits>

#include "device/sizes.h"
#include "host/aligned.h"
#include "host/cuda/launch_scope.h"
#include "host/dispatch.h"
#include "ops/compressed_kv/compressed_kv.h"
#include "ops/compressed_kv/decode/decode_config.h"
#include "ops/compressed_kv/decode/decode_launch.h"
#include "ops/compressed_kv/decode/general.h"

namespace htree::compressed_kv {
namespace {

constexpr int64_t kGeneralStep = 64;  // tokens of a split of the general kernel count in these
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

}  // namespace

void decode_cuda(const DecodeProblem& p, const DecodeTensors& t, const at::Tensor& out,
                 const at::Tensor& lse) {
  const LaunchScope scope(t.q);
  const cudaStream_t stream = scope.stream();
  const QueryType type = query_type_of(t.q);
  const int64_t num_queries = p.batch * p.num_heads;
  const int num_slots = std::max(1, p.hadamard_group);
  const int64_t head_chunks = ceil_div(p.heads_per_kv(), kHeadsPerBlock);
  const int64_t num_groups = p.batch * p.num_kv_heads * head_chunks;
  const cudaDeviceProp* const properties = at::cuda::getCurrentDeviceProperties();
  const int num_processors = properties->multiProcessorCount;
  // Whole tiles of half queries with one slot go to the tensor cores.
  const bool tiles = type != QueryType::kFloat && num_slots == 1 && p.page % kTileRows == 0;

  const int cheap_splits = properties->major >= 9 ? kMostClusterSplits : 1;

  // A fixed split follows from the argument alone; tiles need its multiple of 16.
  const int64_t split_size =
      p.split_size > 0 ? ceil_div(p.split_size, kTileRows) * kTileRows
      : tiles          ? choose_split_size(p.capacity, num_groups, num_processors, 256, cheap_splits)
                       : choose_split_size(p.capacity, num_groups, 4 * num_processors, kGeneralStep, 0);
  const int64_t num_splits = ceil_div(p.capacity, split_size);
  // The tensor-core kernel takes the window along, dealt to its splits.
  const int64_t window_share = num_splits > 0 ? ceil_div(p.window, num_splits) : 0;
  const bool fused = tiles && num_splits > 0 && window_share <= kMostWindowTokens;
  const Ending ending = !fused || num_splits > cheap_splits ? Ending::kParts
                        : num_splits == 1                   ? Ending::kResult
                                                            : Ending::kCluster;
  const int64_t num_parts = num_splits + (fused ? 0 : ceil_div(p.window, kWindowSplit));
  if (num_parts == 0) {
    out.zero_();
    lse.fill_(-std::numeric_limits<float>::infinity());
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(num_groups * num_parts <= std::numeric_limits<int32_t>::max(),
                              "kv_decode_attention: ", num_groups, " groups of heads times ", num_parts,
                              " splits are more than 2^31 blocks");

  const auto floats = t.q.options().dtype(at::kFloat);
  const int64_t stored_parts = ending == Ending::kParts ? num_parts : 0;
  const at::Tensor acc = at::empty({num_queries, stored_parts, p.head_dim}, floats);
  const at::Tensor stats = at::empty({2, num_queries, stored_parts}, floats);
  // Tiles are copied in chunks of 16 bytes that may start before their first row, but not before the tensor.
  const at::Tensor k_win = aligned_contiguous(t.k_win);
  const at::Tensor v_win = aligned_contiguous(t.v_win);
  const Compressed k{t.k.format, aligned_contiguous(t.k.bitmap), aligned_contiguous(t.k.values),
                     aligned_contiguous(t.k.scales)};
  const Compressed v{t.v.format, aligned_contiguous(t.v.bitmap), aligned_contiguous(t.v.values),
                     aligned_contiguous(t.v.scales)};
  constexpr double kLog2E = 1.4426950408889634;
  DecodeParams d{.q = t.q.const_data_ptr(),
                 .q_type = type,
                 .k = view_of(k),
                 .v = view_of(v),
                 .num_rows = k.bitmap.numel() / k.format.words(),
                 .num_queries = num_queries,
                 .comp_len = lengths_of(t.comp_len),
                 .block_table = lengths_of(t.block_table),
                 .part_acc = acc.mutable_data_ptr<float>(),
                 .part_max = stats.mutable_data_ptr<float>(),
                 .part_sum = stats.mutable_data_ptr<float>() + num_queries * stored_parts,
                 .capacity = p.capacity,
                 .split_size = split_size,
                 .num_heads = static_cast<int>(p.num_heads),
                 .num_kv_heads = static_cast<int>(p.num_kv_heads),
                 .head_chunks = static_cast<int>(head_chunks),
                 .page = static_cast<int>(p.page),
                 .max_pages = static_cast<int>(p.max_pages),
                 .num_pages = static_cast<int>(p.num_pages),
                 .num_splits = static_cast<int>(num_splits),
                 .num_parts = static_cast<int>(num_parts),
                 .first_part = 0,
                 .num_slots = num_slots,
                 .score_scale = static_cast<float>(p.scale * kLog2E),
                 .window = {.k = k_win.const_data_ptr(),
                            .v = v_win.const_data_ptr(),
                            .len = lengths_of(t.win_len),
                            .capacity = static_cast<int>(p.window),
                            .per_split = fused ? static_cast<int>(window_share) : 0,
                            .bfloat16 = type == QueryType::kBfloat16},
                 .ending = ending,
                 .out = out.mutable_data_ptr(),
                 .lse = lse.mutable_data_ptr<float>(),
                 .out_type = type};

  dispatch_int<64, 128, 256>("kv_decode_attention", "D", p.head_dim, [&](auto head_dim) {
    constexpr int kHeadDim = decltype(head_dim)::value;
    at::Tensor transformed;
    if (p.hadamard_group > 0) {
      transformed = at::empty({num_slots, num_queries, p.head_dim}, floats);
      check_launch(
          launch_transform_query<kHeadDim>(d, num_queries, transformed.mutable_data_ptr<float>(), stream));
      d.q = transformed.const_data_ptr();
      d.q_type = QueryType::kFloat;
    }
    if (num_splits > 0 && tiles) {
      check_launch(launch_decode<kHeadDim>(d, k.format.bits, v.format.bits, type, num_groups, stream));
    } else if (num_splits > 0) {
      const GeneralParams general{d, nullptr, nullptr, packed_kind(k.format.bits, type),
                                  packed_kind(v.format.bits, type)};
      check_launch(launch_general<kHeadDim>(general, num_groups, stream));
    }
    if (p.window > 0 && !fused) {
      GeneralParams window{d, k_win.const_data_ptr(), v_win.const_data_ptr(), dense_kind(type),
                           dense_kind(type)};
      window.base.comp_len = lengths_of(t.win_len);
      window.base.capacity = p.window;
      window.base.split_size = kWindowSplit;
      window.base.num_splits = static_cast<int>(num_parts - num_splits);
      window.base.first_part = static_cast<int>(num_splits);
      check_launch(launch_general<kHeadDim>(window, num_groups, stream));
    }
    if (ending == Ending::kParts) {
      check_launch(launch_merge<kHeadDim>(d, num_queries, stream));
    }
  });
}

}  // namespace htree::compressed_kv
