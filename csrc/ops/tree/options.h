// The options of tree attention (docs/semantics/tree_attention.md §1.1): their one owner in C++. To add one, add a member
// with its default, a row of for_each_option() and, where it has a range, a check in options.cpp. Schemas, the packed
// form of the ops and what autograd keeps follow from the table (tree_attention/packed_options.h). A kernel that selects
// gets the option with SelectionOptions, one of a whole call with AttentionArgs. Torch-free, because kernels include it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace htree::tree_attention {

// By what a candidate is selected, §1.6.
enum class Importance { kLseCausal, kLse, kExpJoint };
constexpr std::array<std::string_view, 3> kImportanceNames = {"lse_causal", "lse", "exp_joint"};

// How a query chooses among the candidates of a layer: what every kernel takes that selects.
struct SelectionOptions {
  Importance importance = Importance::kLseCausal;
  bool open_next = false;  // half of the selected are the candidates behind the others, §1.6
};

// The options of a call as they were asked for.
struct TreeOptions : SelectionOptions {
  int64_t compression_rate = 16;                // r, children per node
  int64_t max_top_nodes = 8192;                 // M
  int64_t top_k = 512;                          // k
  std::optional<double> scale;                  // none: K^-1/2
  std::optional<double> rope_base = 10000.0;    // none: nothing is rotated
  int64_t selection_stride = 1;                 // s
  std::optional<int64_t> selection_span;        // c, tokens of a span mean that the selection scores, §1.15
  std::optional<std::vector<double>> inv_freq;  // radians per position of each pair of dims

  const SelectionOptions& selection() const { return *this; }
};

// The table: calls f(name, member) for every option, in the order of the schemas. The first kDocumentedOptions are those
// of the design documents, which stand before the last argument of an op there; the others came later.
constexpr int kDocumentedOptions = 7;
template <typename Options, typename F>
void for_each_option(Options& options, F&& f) {
  f("compression_rate", options.compression_rate);
  f("max_top_nodes", options.max_top_nodes);
  f("top_k_per_layer", options.top_k);
  f("scale", options.scale);
  f("rope_base", options.rope_base);
  f("importance", options.importance);
  f("selection_stride", options.selection_stride);
  f("selection_span", options.selection_span);
  f("inv_freq", options.inv_freq);
  f("open_next", options.open_next);
}

// Raises ValueError where an option is out of its range, whatever the tensors are.
void check_options(const char* op, const TreeOptions& options);

// A whole attention call, as the kernels take it: with numbers for what was not given. The queries are as many equal
// pieces as there are `starts`, one behind the other; the first query of piece p stands at token starts[p]. Several
// pieces, and where they start, are multiples of `selection_stride`.
struct AttentionArgs {
  SelectionOptions selection;
  int64_t compression_rate = 16;
  int64_t max_top_nodes = 8192;
  int64_t top_k = 512;
  int64_t selection_stride = 1;
  int64_t selection_span = 0;  // 0 for None
  double scale = 1.0;
  bool rotate = true;  // false where rope_base is None: no rotation at any layer
  double rope_base = 10000.0;
  std::vector<double> inv_freq;  // empty for rope_base^(-2i/K)
  std::vector<int64_t> starts = {0};
};
// The options with numbers for keys of K dims, for queries from token 0 on.
AttentionArgs resolve(const TreeOptions& options, int64_t key_dim);

}  // namespace htree::tree_attention
