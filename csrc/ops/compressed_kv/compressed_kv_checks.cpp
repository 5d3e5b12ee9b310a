// All checks and the outputs' allocation, shared by the CPU, CUDA and Meta kernels.
#include <vector>

#include "host/check.h"
#include "host/outputs.h"
#include "ops/compressed_kv/compressed_kv.h"
#include "ops/hadamard/hadamard_params.h"

namespace htree::compressed_kv {
namespace {

// The kernel depends on the head size, so a symbolic one becomes a constant of the trace.
int64_t guard(const c10::SymInt& size) {
  return size.guard_int(__FILE__, __LINE__);
}

int check_head_dim(const char* op, const char* name, const at::Tensor& tensor) {
  const int64_t head_dim = guard(tensor.sym_size(-1));
  TORCH_CHECK_VALUE(is_head_dim(head_dim), op, ": D of ", name, " must be a multiple of 64 between 64 and ",
                    kMostHeadDim, ", got ", head_dim, " in ", tensor.sym_sizes());
  return static_cast<int>(head_dim);
}

void check_keep(const char* op, const char* name, int64_t keep, int64_t head_dim) {
  TORCH_CHECK_VALUE(keep >= 1 && keep <= head_dim, op, ": ", name, " must be between 1 and D = ", head_dim,
                    ", got ", keep);
}

void check_bits(const char* op, const char* name, int64_t bits) {
  TORCH_CHECK_VALUE(bits == 16 || bits == 8 || bits == 4, op, ": ", name, " must be 16, 8 or 4, got ", bits);
}

void check_weight(const char* op, const at::Tensor& x, const OptionalTensor& weight) {
  if (weight.has_value()) {
    check_dtype(op, "weight", *weight, {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble});
    check_same_device(op, "weight", *weight, "x", x);
    const auto sizes = x.sym_sizes();
    check_shape(op, "weight", *weight, {sizes[0], sizes[1], sizes[3]}, "[B, H_kv, D] of x");
  }
}

RowFormat check_rows(const char* op, const at::Tensor& x, int64_t keep, int64_t bits,
                     const OptionalTensor& weight) {
  check_rank(op, "x", x, 4, "[B, H_kv, S, D]");
  const int head_dim = check_head_dim(op, "x", x);
  check_keep(op, "keep", keep, head_dim);
  check_weight(op, x, weight);
  return row_format(head_dim, keep, bits);
}

// `names` are those of the bitmap, the values and the scales.
void check_compressed(const char* op, const char* const (&names)[3], const at::Tensor& bitmap,
                      const at::Tensor& values, const at::Tensor& scales, const RowFormat& format) {
  check_dtype(op, names[0], bitmap, {at::kLong});
  check_dtype(op, names[1], values, {at::kByte});
  check_dtype(op, names[2], scales, {at::kHalf});
  check_rank(op, names[0], bitmap, 4, "[B, H_kv, S, D/64]");
  check_rank(op, names[1], values, 4, "[B, H_kv, S, row_bytes]");
  check_rank(op, names[2], scales, 3, "[B, H_kv, S]");
  check_same_device(op, names[1], values, names[0], bitmap);
  check_same_device(op, names[2], scales, names[0], bitmap);
  check_size(op, names[0], bitmap, 3, format.words(), "D/64");
  const auto sizes = bitmap.sym_sizes();
  check_shape(op, names[1], values, {sizes[0], sizes[1], sizes[2], format.row_bytes()},
              "the first dims of the bitmap, then ceil(keep * bits / 8) rounded up to a multiple of 4");
  check_shape(op, names[2], scales, {sizes[0], sizes[1], format.quantised() ? sizes[2] : c10::SymInt(0)},
              "the first dims of the bitmap; S = 0 with 16 bits");
}

constexpr const char* kDecode = "kv_decode_attention";

void check_lengths(const char* name, const OptionalTensor& lengths, const at::Tensor& q) {
  if (lengths.has_value()) {
    check_dtype(kDecode, name, *lengths, {at::kInt});
    check_same_device(kDecode, name, *lengths, "q", q);
    check_shape(kDecode, name, *lengths, {q.sym_size(0)}, "[B]");
  }
}

void check_window(const char* name, const at::Tensor& window, const DecodeArguments& a,
                  const c10::SymInt& num_kv_heads, int head_dim, const char* words) {
  check_rank(kDecode, name, window, 4, "[B, H_kv, W, D]");
  check_same_dtype(kDecode, name, window, "q", a.q);
  check_same_device(kDecode, name, window, "q", a.q);
  check_shape(kDecode, name, window, {a.q.sym_size(0), num_kv_heads, a.k_win.sym_size(2), head_dim}, words);
}

}  // namespace

Outputs2 prepare_prune(const at::Tensor& x, int64_t keep, const OptionalTensor& weight) {
  constexpr const char* kOp = "kv_prune";
  check_dtype(kOp, "x", x, {at::kFloat, at::kHalf, at::kBFloat16});
  const RowFormat format = check_rows(kOp, x, keep, /*bits=*/16, weight);
  const auto sizes = x.sym_sizes();
  return {new_tensor_like(x), new_tensor({sizes[0], sizes[1], sizes[2], format.words()}, at::kLong, x)};
}

Outputs3 prepare_compress(const at::Tensor& x, int64_t keep, int64_t bits, const OptionalTensor& weight) {
  constexpr const char* kOp = "kv_compress";
  check_bits(kOp, "bits", bits);
  check_dtype(kOp, "x", x, {at::kFloat, at::kHalf, at::kBFloat16});
  TORCH_CHECK_TYPE(bits != 16 || x.scalar_type() != at::kFloat, kOp, ": x must have dtype ",
                   dtype_names({at::kHalf, at::kBFloat16}),
                   " where bits is 16, got torch.float32: convert it first");
  const RowFormat format = check_rows(kOp, x, keep, bits, weight);
  const auto sizes = x.sym_sizes();
  return {new_tensor({sizes[0], sizes[1], sizes[2], format.words()}, at::kLong, x),
          new_tensor({sizes[0], sizes[1], sizes[2], format.row_bytes()}, at::kByte, x),
          new_tensor({sizes[0], sizes[1], format.quantised() ? sizes[2] : c10::SymInt(0)}, at::kHalf, x)};
}

at::Tensor prepare_decompress(const at::Tensor& bitmap, const at::Tensor& values, const at::Tensor& scales,
                              c10::SymInt head_dim, int64_t keep, int64_t bits, at::ScalarType dtype) {
  constexpr const char* kOp = "kv_decompress";
  const int64_t channels = guard(head_dim);
  TORCH_CHECK_VALUE(is_head_dim(channels), kOp, ": D must be a multiple of 64 between 64 and ", kMostHeadDim,
                    ", got ", channels);
  check_keep(kOp, "keep", keep, channels);
  check_bits(kOp, "bits", bits);
  check_compressed(kOp, {"bitmap", "values", "scales"}, bitmap, values, scales,
                   row_format(channels, keep, bits));
  TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16 || (dtype == at::kFloat && bits != 16), kOp,
                   ": dtype must be ", dtype_names({at::kHalf, at::kBFloat16}),
                   bits == 16 ? " for 16 bits" : " or torch.float32", ", got ", dtype_name(dtype));
  const auto sizes = bitmap.sym_sizes();
  return new_tensor({sizes[0], sizes[1], sizes[2], channels}, dtype, bitmap);
}

Outputs2 prepare_decode(const DecodeArguments& a) {
  check_dtype(kDecode, "q", a.q, {at::kFloat, at::kHalf, at::kBFloat16});
  TORCH_CHECK_VALUE(a.q.dim() == 3 || a.q.dim() == 4, kDecode, ": q must be [B, H, D] or [B, H, n, D], got ",
                    a.q.sym_sizes());
  const int key_dim = check_head_dim(kDecode, "q", a.q);
  check_rank(kDecode, "v_bitmap", a.v.bitmap, 4, "[B, H_kv, S, D/64]");
  const int64_t words = guard(a.v.bitmap.sym_size(3));
  TORCH_CHECK_VALUE(words >= 1 && words <= kMostHeadDim / 64, kDecode,
                    ": D/64 of v_bitmap must be between 1 and ", kMostHeadDim / 64, ", got ", words, " in ",
                    a.v.bitmap.sym_sizes());
  const int value_dim = static_cast<int>(64 * words);
  check_bits(kDecode, "k_bits", a.k.bits);
  check_bits(kDecode, "v_bits", a.v.bits);
  check_keep(kDecode, "k_keep", a.k.keep, key_dim);
  check_keep(kDecode, "v_keep", a.v.keep, value_dim);
  check_same_device(kDecode, "k_bitmap", a.k.bitmap, "q", a.q);
  check_same_device(kDecode, "v_bitmap", a.v.bitmap, "q", a.q);
  check_compressed(kDecode, {"k_bitmap", "k_values", "k_scales"}, a.k.bitmap, a.k.values, a.k.scales,
                   row_format(key_dim, a.k.keep, a.k.bits));
  check_compressed(kDecode, {"v_bitmap", "v_values", "v_scales"}, a.v.bitmap, a.v.values, a.v.scales,
                   row_format(value_dim, a.v.keep, a.v.bits));
  const auto sizes = a.k.bitmap.sym_sizes();
  check_shape(kDecode, "v_bitmap", a.v.bitmap, {sizes[0], sizes[1], sizes[2], words},
              "the first dims of k_bitmap, then D/64 of the values");
  const c10::SymInt num_kv_heads = sizes[1];
  TORCH_CHECK_VALUE(holds(num_kv_heads.sym_ge(1)), kDecode, ": H_kv of k_bitmap must be at least 1, got ",
                    sizes);
  TORCH_CHECK_VALUE(holds((a.q.sym_size(1) % num_kv_heads).sym_eq(0)), kDecode,
                    ": H of q must be a multiple of H_kv = ", num_kv_heads, ", got ", a.q.sym_size(1), " in ",
                    a.q.sym_sizes());
  if (a.block_table.has_value()) {
    check_dtype(kDecode, "block_table", *a.block_table, {at::kInt});
    check_same_device(kDecode, "block_table", *a.block_table, "q", a.q);
    check_rank(kDecode, "block_table", *a.block_table, 2, "[B, max_pages]");
    check_size(kDecode, "block_table", *a.block_table, 0, a.q.sym_size(0), "B of q");
    TORCH_CHECK_VALUE(holds(sizes[2].sym_ge(1)) && holds(sizes[0].sym_ge(1)), kDecode,
                      ": k_bitmap must be [num_pages >= 1, H_kv, page >= 1, D/64] with a block_table, got ",
                      sizes);
  } else {
    check_size(kDecode, "k_bitmap", a.k.bitmap, 0, a.q.sym_size(0), "B of q");
  }
  check_rank(kDecode, "k_win", a.k_win, 4, "[B, H_kv, W, D]");
  check_window("k_win", a.k_win, a, num_kv_heads, key_dim, "[B, H_kv, W, D] of q and k_bitmap");
  check_window("v_win", a.v_win, a, num_kv_heads, value_dim,
               "[B, H_kv, W, D], the first dims those of k_win");
  check_lengths("comp_len", a.comp_len, a.q);
  check_lengths("win_len", a.win_len, a.q);
  if (a.scale.has_value()) {
    check_finite(kDecode, "scale", *a.scale);
  }
  TORCH_CHECK_VALUE(a.split_size >= 0 && a.split_size < int64_t{1} << 31, kDecode,
                    ": split_size must be at least 0 and below 2^31, got ", a.split_size);
  const int64_t group = a.hadamard_group;
  TORCH_CHECK_VALUE(
      group == 0 || (group > 0 && (group & (group - 1)) == 0 && holds((num_kv_heads % group).sym_eq(0))),
      kDecode, ": hadamard_group must be 0 or a power of two that divides H_kv = ", num_kv_heads, ", got ",
      group);
  constexpr int64_t kMostChannels = int64_t{1} << hadamard::kMaxLog2Length;
  TORCH_CHECK_VALUE(group <= kMostChannels / key_dim, kDecode, ": hadamard_group must be at most ",
                    kMostChannels / key_dim, " for D = ", key_dim, ", got ", group);
  TORCH_CHECK_VALUE(group == 0 || (key_dim & (key_dim - 1)) == 0, kDecode,
                    ": hadamard_group must be 0 where D of keys is no power of two, got ", group,
                    " for D = ", key_dim);
  const auto rows = a.q.sym_sizes().slice(0, a.q.dim() - 1);
  std::vector<c10::SymInt> out_sizes(rows.begin(), rows.end());
  out_sizes.emplace_back(value_dim);
  return {new_tensor(out_sizes, a.q.scalar_type(), a.q), new_tensor(rows, at::kFloat, a.q)};
}

DecodeProblem decode_problem_of(const DecodeArguments& a) {
  const bool paged = a.block_table.has_value();
  const int64_t key_dim = a.q.size(-1);
  const int64_t page = paged ? a.k.bitmap.size(2) : 0;
  const int64_t max_pages = paged ? a.block_table->size(1) : 0;
  const int64_t num_queries = a.q.dim() == 4 ? a.q.size(2) : 1;
  return {.batch = a.q.size(0),
          .num_queries = num_queries,
          .num_heads = a.q.size(1) * num_queries,
          .num_kv_heads = a.k.bitmap.size(1),
          .key_dim = static_cast<int>(key_dim),
          .value_dim = static_cast<int>(a.v_win.size(-1)),
          .capacity = paged ? max_pages * page : a.k.bitmap.size(2),
          .window = a.k_win.size(2),
          .page = page,
          .num_pages = paged ? a.k.bitmap.size(0) : 0,
          .max_pages = max_pages,
          .hadamard_group = static_cast<int>(a.hadamard_group),
          .split_size = a.split_size,
          .scale = a.scale.value_or(1.0 / std::sqrt(static_cast<double>(key_dim)))};
}

}  // namespace htree::compressed_kv
