#include "ops/tree/documents.h"

#include <algorithm>

namespace htree::tree_attention {

void check_documents(const char* op, const Documents& documents, const char* query_name,
                     const Tensor& query) {
  for (const auto& [name, offsets] :
       {std::pair("cu_seq_q", documents.cu_seq_q), std::pair("cu_seq_k", documents.cu_seq_k)}) {
    check_rank(op, name, offsets, 1, "[documents + 1]");
    check_dtype(op, name, offsets, {at::kInt});
    check_same_device(op, name, offsets, query_name, query);
    TORCH_CHECK_VALUE(holds(offsets.sym_size(0).sym_ge(1)), op, ": ", name,
                      " must have at least one element, got ", offsets.sym_sizes());
  }
  check_size(op, "cu_seq_k", documents.cu_seq_k, 0, documents.cu_seq_q.sym_size(0),
             "documents + 1 of cu_seq_q");
  for (const auto& [name, most] :
       {std::pair("max_q", documents.max_q), std::pair("max_k", documents.max_k)}) {
    TORCH_CHECK_VALUE(holds(most.sym_ge(0)), op, ": ", name, " must be at least 0, got ", most);
  }
}

HostOffsets host_offsets(const int32_t* given, int64_t size, int64_t rows) {
  HostOffsets offsets;
  offsets.given.assign(given, given + size);
  offsets.starts.assign(size, 0);
  for (int64_t i = 1; i < size; ++i) {
    offsets.starts[i] = std::max(offsets.starts[i - 1], std::clamp<int64_t>(given[i], 0, rows));
  }
  return offsets;
}

void refuse_offsets(const char* op, const char* name, const HostOffsets& offsets, const char* rows_name,
                    int64_t rows) {
  const std::vector<int64_t>& given = offsets.given;
  TORCH_CHECK_VALUE(given[0] == 0, op, ": ", name, " must begin with 0, got ", given[0]);
  for (size_t i = 1; i < given.size(); ++i) {
    TORCH_CHECK_VALUE(given[i] >= given[i - 1], op, ": ", name, " must not descend, got ", given[i],
                      " behind ", given[i - 1], " at document ", i - 1);
    TORCH_CHECK_VALUE(given[i] <= rows, op, ": ", name, " must end at or before the last row of ", rows_name,
                      " (", rows, "), got ", given[i], " at document ", i - 1);
  }
}

void refuse_document(const char* op, int64_t i, int64_t num_queries, int64_t num_keys,
                     const Documents& documents, int64_t stride) {
  const auto fits = [&](const char* name, const SymInt& most, int64_t count) {
    TORCH_CHECK_VALUE(count <= most, op, ": ", name, " must be at least the length of every document, got ",
                      most, " and ", count, " rows in document ", i);
  };
  fits("max_q", documents.max_q, num_queries);
  fits("max_k", documents.max_k, num_keys);
  TORCH_CHECK_VALUE(num_queries <= num_keys, op,
                    ": cu_seq_q must give no document more queries than cu_seq_k gives it keys, got ",
                    num_queries, " and ", num_keys, " in document ", i);
  TORCH_CHECK_VALUE(num_queries == 0 || (num_keys - num_queries) % stride == 0, op,
                    ": cu_seq_q and cu_seq_k must differ by a multiple of selection_stride = ", stride,
                    " in every document, got ", num_queries, " queries and ", num_keys, " keys in document ",
                    i);
}

}  // namespace htree::tree_attention
