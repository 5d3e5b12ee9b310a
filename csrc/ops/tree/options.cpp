#include "ops/tree/options.h"

#include <cmath>
#include <string>

#include "ops/tree/tree_checks.h"

namespace htree::tree_attention {

void check_options(const char* op, const TreeOptions& options) {
  const TreeOptions defaults;
  check_rate(op, options.compression_rate);
  check_list_width(op, "top_k", options.top_k, options.compression_rate);
  TORCH_CHECK_VALUE(options.max_top_nodes >= 1 && options.max_top_nodes < kIndexLimit, op,
                    ": max_top_nodes must be at least 1 and below 2^31, got ", options.max_top_nodes);
  check_selection_stride(op, options.selection_stride, options.compression_rate);
  check_scale(op, options.scale);
  check_selection_span(op, options.selection_span, options.compression_rate, options.importance);
  if (options.rope_base.has_value()) {
    TORCH_CHECK_VALUE(std::isfinite(static_cast<float>(*options.rope_base)) && *options.rope_base > 0, op,
                      ": rope_base must be positive and finite in float32, or None for no rotation, got ",
                      *options.rope_base);
  }
  if (options.inv_freq.has_value()) {
    TORCH_CHECK_VALUE(options.rope_base == defaults.rope_base, op, ": rope_base must keep its default ",
                      *defaults.rope_base, " where inv_freq is given, got ",
                      options.rope_base.has_value() ? std::to_string(*options.rope_base) : "None");
    TORCH_CHECK_VALUE(!options.inv_freq->empty(), op, ": inv_freq must have K/2 numbers, got 0");
    for (size_t i = 0; i < options.inv_freq->size(); ++i) {
      const double frequency = (*options.inv_freq)[i];
      TORCH_CHECK_VALUE(std::isfinite(static_cast<float>(frequency)), op,
                        ": inv_freq must be finite in float32, got ", frequency, " at ", i);
    }
  }
}

AttentionArgs resolve(const TreeOptions& options, int64_t key_dim) {
  AttentionArgs args;
  args.selection = options.selection();
  args.compression_rate = options.compression_rate;
  args.max_top_nodes = options.max_top_nodes;
  args.top_k = options.top_k;
  args.selection_stride = options.selection_stride;
  args.selection_span = options.selection_span.value_or(0);
  args.scale = resolve_scale(options.scale, key_dim);
  args.rotate = options.rope_base.has_value();
  args.rope_base = options.rope_base.value_or(args.rope_base);
  args.inv_freq = options.inv_freq.value_or(args.inv_freq);
  return args;
}

}  // namespace htree::tree_attention
