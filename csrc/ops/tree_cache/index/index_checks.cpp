// The checks declared in index_keys.h, on symbolic sizes: Meta runs them too.
#include "host/check.h"
#include "ops/tree_cache/index/index_keys.h"

namespace htree::tree_cache {
namespace {

constexpr at::ScalarType kCodes = at::kByte;

}  // namespace

void check_index_pool(const char* op, const Pools& pools, const IndexPool& index, int64_t page_size) {
  constexpr const char* kName = "index_pool";
  const Tensor& index_pool = index.keys;
  check_rank(op, kName, index_pool, 4, "[num_pages, H_i, page_size, d]");
  if (index_pool.scalar_type() != kCodes) check_floating(op, kName, index_pool, /*double_on_cuda=*/false);
  check_same_device(op, kName, index_pool, "k_pool", pools.keys);
  check_contiguous(op, kName, index_pool);
  check_size(op, kName, index_pool, 0, pools.keys.sym_size(0), "num_pages of k_pool");
  check_size(op, kName, index_pool, 2, page_size, "page_size");
  tree_attention::check_index_heads(op, kName, index_pool, index_pool.sym_size(1), pools.keys.sym_size(1));
  tree_attention::check_index_width(op, kName, index_pool);
  TORCH_CHECK_VALUE(index.coded() == (index_pool.scalar_type() == kCodes), op, ": index_scales must be ",
                    index.coded() ? "None where index_pool is not" : "given where index_pool is",
                    " uint8, got ", index.coded() ? "a tensor" : "None");
  if (!index.coded()) return;
  const Tensor& scales = index.scales;
  check_rank(op, "index_scales", scales, 3, "[num_pages, H_i, page_size]");
  check_dtype(op, "index_scales", scales, {at::kByte});
  check_same_device(op, "index_scales", scales, kName, index_pool);
  check_contiguous(op, "index_scales", scales);
  for (int64_t i = 0; i < 3; ++i) {
    check_size(op, "index_scales", scales, i, index_pool.sym_size(i), kName);
  }
}

void check_index_rows(const char* op, const char* name, const Tensor& rows, const char* like_name,
                      const Tensor& like, const Tensor& index_pool) {
  const int64_t rank = like.dim();
  check_rank(op, name, rows, rank, rank == 4 ? "[B, n, H_i, d]" : "[N, H_i, d]");
  if (index_pool.scalar_type() == kCodes) {
    check_dtype(op, name, rows, {at::kBFloat16});
  } else {
    check_same_dtype(op, name, rows, "index_pool", index_pool);
  }
  check_same_device(op, name, rows, "index_pool", index_pool);
  for (int64_t i = 0; i < rank - 2; ++i) {
    check_size(op, name, rows, i, like.sym_size(i), like_name);
  }
  check_size(op, name, rows, rank - 2, index_pool.sym_size(1), "H_i of index_pool");
  check_size(op, name, rows, rank - 1, index_pool.sym_size(3), "d of index_pool");
}

}  // namespace htree::tree_cache
