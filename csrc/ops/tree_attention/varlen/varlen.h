// Contract of tree attention over packed documents: checks, outputs, and what CPU and CUDA have to provide.
// docs/semantics/tree_attention.md §1.16
#pragma once

#include <vector>

#include "ops/selection/select_blocks.h"
#include "ops/tree/documents.h"
#include "ops/tree_attention/attention.h"
#include "ops/tree_attention/kernels.h"
#include "ops/tree_attention/plan/varlen.h"

namespace htree::tree_attention {

// query [N, H, K], key [N_k, H_kv, K], value [N_k, H_kv, V]; index_query [N, H_i, d] and index_key [N_k, H_i, d], undefined
// where the mean scores choose.
struct PackedInputs {
  Tensor query, key, value;
  Tensor index_query = {}, index_key = {};
};

// (out [N, H, V], gmax [N, H], gsum [N, H])
using VarlenState = std::tuple<Tensor, Tensor, Tensor>;

// Columns of a plan's table: which padded rows of a group are whose. Padded row i of a document is packed row
// begin + i - shift where 0 <= i - shift < count, else padding.
enum TableColumn { kQueryBegin, kQueryShift, kQueryCount, kKeyBegin, kKeyShift, kKeyCount, kTableColumns };

// Rows between a packed tensor [N, ...] and a padded one [documents, rows, ...].
struct RowCopy {
  Tensor packed, padded;
  Tensor table;        // int32 [documents, 3], three columns of a plan's table
  double padding = 0;  // what a gather writes to rows that belong to no document
};
// All copies of a group at once.
using GatherRows = void(const std::vector<RowCopy>& copies);
using ScatterRows = void(const std::vector<RowCopy>& copies);
// Writes the rows of `packed` that no group writes: NaN in those of broken documents, else `empty`. starts int32
// [documents + 1] ascends from 0, kinds int32 [documents] holds DocumentKind.
using FillRows = void(const Tensor& starts, const Tensor& kinds, double empty, const Tensor& packed);

GatherRows gather_rows_cpu, gather_rows_cuda;
ScatterRows scatter_rows_cpu, scatter_rows_cuda;
FillRows fill_rows_cpu, fill_rows_cuda;

struct VarlenKernels {
  AttentionForward* forward;
  AttentionForward* over_lists;
  AttentionBackward* backward;
  SelectBlockLayers* select;
  GatherRows* gather;
  ScatterRows* scatter;
  FillRows* fill;
  // Whether the stream of a tensor records a graph, so that nothing can be read on the host.
  bool (*records_graph)(const Tensor& like);
  // On the CPU, where "auto" runs document by document, and a broken one is an error.
  bool on_host;
};
extern const VarlenKernels kVarlenCpu, kVarlenCuda;

// Everything that can be checked without reading the lengths. `grouping` is "auto", "document", "length" or "rank".
void check_varlen(const char* op, const PackedInputs& inputs, const Documents& documents,
                  const TreeOptions& options, std::string_view grouping);

// Without `kernels` (Meta) both end after checks and allocations. dout or dlse may be missing.
VarlenState varlen_forward(const VarlenKernels* kernels, const char* op, const PackedInputs& inputs,
                           const Documents& documents, const TreeOptions& options, std::string_view grouping);
Gradients varlen_backward(const VarlenKernels* kernels, const OptionalTensor& dout,
                          const OptionalTensor& dlse, const PackedInputs& inputs, const Documents& documents,
                          const VarlenState& state, const TreeOptions& options, std::string_view grouping,
                          std::array<bool, 3> output_mask);

}  // namespace htree::tree_attention
