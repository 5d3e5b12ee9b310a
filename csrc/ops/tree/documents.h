// Packed documents: where they lie, and the checks of their offsets, which families share.
// docs/semantics/tree_attention.md §1.16
#pragma once

#include <vector>

#include "ops/tree/tree_checks.h"

namespace htree::tree_attention {

// The documents of a call: document i has the queries cu_seq_q[i] ... cu_seq_q[i + 1] - 1 and the keys
// cu_seq_k[i] ... cu_seq_k[i + 1] - 1, at most max_q and max_k of them.
struct Documents {
  Tensor cu_seq_q, cu_seq_k;  // int32 [documents + 1]
  SymInt max_q, max_k;
};

// What can be checked without reading the offsets. They lie on the device of `query`, which messages call `query_name`.
void check_documents(const char* op, const Documents& documents, const char* query_name, const Tensor& query);

// Offsets on the host, as the caller wrote them, and ascending from 0 to at most the rows.
struct HostOffsets {
  std::vector<int64_t> given, starts;
  bool kept(int64_t i) const { return given[i] == starts[i] && given[i + 1] == starts[i + 1]; }
  int64_t count(int64_t i) const { return starts[i + 1] - starts[i]; }
};

HostOffsets host_offsets(const int32_t* given, int64_t size, int64_t rows);

// ValueError for offsets that descend or leave their tensor. `rows_name` is that tensor, with `rows` rows.
void refuse_offsets(const char* op, const char* name, const HostOffsets& offsets, const char* rows_name,
                    int64_t rows);

// ValueError for document `i` where its lengths break the contract.
void refuse_document(const char* op, int64_t i, int64_t num_queries, int64_t num_keys,
                     const Documents& documents, int64_t stride);

}  // namespace htree::tree_attention
