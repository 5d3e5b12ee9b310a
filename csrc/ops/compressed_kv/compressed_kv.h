// The contract of the compressed_kv family: sizes, checks and entry points. docs/semantics/compressed_kv.md
// §4.4 to §4.6
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/compressed_kv/format.h"

namespace htree::compressed_kv {

using OptionalTensor = std::optional<at::Tensor>;
using Outputs3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Outputs2 = std::tuple<at::Tensor, at::Tensor>;

// One compressed tensor: bitmap int64 [N, H_kv, S, D/64], values uint8 [N, H_kv, S, row_bytes], scales fp16
// [N, H_kv, S] (with 16 bits [N, H_kv, 0]). N is the batch and S the capacity; with a block table N counts
// pages and S the tokens of a page.
struct Compressed {
  RowFormat format;
  at::Tensor bitmap;
  at::Tensor values;
  at::Tensor scales;
};

// The format of checked numbers.
constexpr RowFormat row_format(int64_t head_dim, int64_t keep, int64_t bits) {
  return {static_cast<int>(head_dim), static_cast<int>(keep), static_cast<int>(bits)};
}

// The queries of a head lie side by side and count as heads of their own, which read the rows of the same kv
// head. Of n queries, query i does not see the last n - 1 - i tokens of the window.
struct DecodeProblem {
  int64_t batch;
  int64_t num_queries;  // of a head
  int64_t num_heads;    // H times these
  int64_t num_kv_heads;
  int key_dim;
  int value_dim;
  int64_t capacity;   // most tokens of the compressed part: S, or max_pages * page
  int64_t window;     // most tokens of the dense window
  int64_t page;       // tokens of a page; 0 without a block table
  int64_t num_pages;  // pages of the pool
  int64_t max_pages;  // pages of one sequence
  int hadamard_group;
  int64_t split_size;  // 0 where the occupancy decides
  double scale;

  int64_t heads_per_kv() const { return num_heads / num_kv_heads; }
};

struct DecodeTensors {
  at::Tensor q;  // [B, num_heads, D of keys]
  Compressed k;
  Compressed v;
  at::Tensor k_win;  // [B, H_kv, W, D]
  at::Tensor v_win;
  OptionalTensor comp_len;     // int32 [B]
  OptionalTensor win_len;      // int32 [B]
  OptionalTensor block_table;  // int32 [B, max_pages]
};

// What kv_decode_attention is given as its keys, or as its values.
struct CompressedArguments {
  const at::Tensor& bitmap;
  const at::Tensor& values;
  const at::Tensor& scales;
  int64_t keep;
  int64_t bits;
};

// The arguments of kv_decode_attention.
struct DecodeArguments {
  const at::Tensor& q;
  CompressedArguments k;
  CompressedArguments v;
  const at::Tensor& k_win;
  const at::Tensor& v_win;
  const OptionalTensor& comp_len;
  const OptionalTensor& win_len;
  std::optional<double> scale;
  const OptionalTensor& block_table;
  int64_t hadamard_group;
  int64_t split_size;
};

// Check on metadata alone and return the outputs, uninitialised and contiguous.
Outputs2 prepare_prune(const at::Tensor& x, int64_t keep, const OptionalTensor& weight);
Outputs3 prepare_compress(const at::Tensor& x, int64_t keep, int64_t bits, const OptionalTensor& weight);
at::Tensor prepare_decompress(const at::Tensor& bitmap, const at::Tensor& values, const at::Tensor& scales,
                              c10::SymInt head_dim, int64_t keep, int64_t bits, at::ScalarType dtype);
Outputs2 prepare_decode(const DecodeArguments& a);

// The sizes of checked arguments, which must not be symbols.
DecodeProblem decode_problem_of(const DecodeArguments& a);

// Entry points. x is [B, H_kv, S, D] with unit stride in D; `weight` is undefined or contiguous fp32 [B,
// H_kv, D]. All outputs, and the compressed tensors of decompress, are contiguous and have at least one row.
using Prune = void(const RowFormat& format, const at::Tensor& x, const at::Tensor& weight,
                   const at::Tensor& pruned, const at::Tensor& bitmap);
using Compress = void(const at::Tensor& x, const at::Tensor& weight, const Compressed& to);
using Decompress = void(const Compressed& from, const at::Tensor& out);
// Tensors are contiguous. out [B, num_heads, D of values] and lse [B, num_heads] have at least one element.
using Decode = void(const DecodeProblem& p, const DecodeTensors& t, const at::Tensor& out,
                    const at::Tensor& lse);
Prune prune_cpu, prune_cuda;
Compress compress_cpu, compress_cuda;
Decompress decompress_cpu, decompress_cuda;
Decode decode_cpu, decode_cuda;

}  // namespace htree::compressed_kv
