// The IO-only variant of the staged pipeline (docs/semantics/io_only.md §2): schema, registrations, and one
// body for CPU and CUDA, which calls the ops of the stages.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "host/no_gradient.h"
#include "host/op_handle.h"
#include "host/registration.h"
#include "ops/tree_attention/attention.h"
#include "ops/tree_attention/stages/select.h"

namespace htree::tree_attention {
namespace {

using StateTensors = std::tuple<Tensor, Tensor, Tensor>;

// Most bytes of scores at a time. Longer sequences are worked on in pieces of queries, like the full pipeline
// of the benchmark.
constexpr int64_t kMaxScoreBytes = int64_t{1} << 30;

TreeOptions io_options(int64_t compression_rate, int64_t max_top_nodes, int64_t top_k,
                       std::optional<double> scale) {
  TreeOptions options;
  options.compression_rate = compression_rate;
  options.max_top_nodes = max_top_nodes;
  options.top_k = top_k;
  options.scale = scale;
  return options;
}

Tensor prepare_io_attention(const Tensor& q, const Tensor& k, const Tensor& v, const TreeOptions& options,
                            std::string_view select) {
  constexpr const char* kOp = "htree_forward_io_only";  // the Python function that calls the op
  parse_io_select(kOp, select);
  const int64_t most = options.top_k * options.compression_rate;
  TORCH_CHECK_VALUE(options.max_top_nodes <= most, kOp,
                    ": max_top_nodes must be at most top_k * compression_rate = ", most, ", got ",
                    options.max_top_nodes);
  return std::get<0>(prepare_attention_forward(kOp, q, k, v, options, /*store_parents=*/false));
}

// ---- the stages, through the dispatcher

Tensor rope_cache(int64_t size, int64_t dim, const Tensor& like) {
  static const auto op = op_handle<Tensor(SymInt, int64_t, double, at::ScalarType, std::optional<at::Device>,
                                          std::optional<at::ArrayRef<double>>)>("htree::rope_cache");
  return op.call(size, dim, 10000.0, state_dtype(like), like.device(), std::nullopt);
}

struct Layer {
  Tensor keys;    // [B, N, H_kv, K]
  Tensor values;  // [B, N, H_kv, V]
};

std::vector<Layer> build_layers(const Tensor& k, const Tensor& v, const TreeOptions& options) {
  static const auto op =
      op_handle<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, int64_t)>("htree::tree_build");
  std::vector<Layer> layers = {{k, v}};
  while (layers.back().keys.size(1) > options.max_top_nodes) {
    auto [keys, values] = op.call(layers.back().keys, layers.back().values, options.compression_rate);
    layers.push_back({keys, values});
  }
  return layers;
}

Tensor top_parents(const Tensor& queries, int64_t kv_heads, const TreeOptions& options, int64_t depth,
                   int64_t t0) {
  static const auto op = op_handle<Tensor(SymInt, SymInt, SymInt, int64_t, int64_t, int64_t, SymInt, int64_t,
                                          std::optional<at::Device>)>("htree::top_parents");
  return op.call(queries.size(0), queries.size(1), kv_heads, options.top_k, depth, options.compression_rate,
                 t0,
                 /*selection_stride=*/1, queries.device());
}

// Merges the state of one layer into `state` and returns the lists of the layer below.
Tensor visit_layer(const Tensor& queries, const Layer& layer, int64_t layer_idx, const Tensor& parents,
                   const Tensor& table, const TreeOptions& options, std::string_view select,
                   bool map_positions, int64_t t0, const StateTensors& state) {
  using Scores = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                            const Tensor&, int64_t, int64_t, std::optional<double>, SymInt);
  using Select = Tensor(const Tensor&, const Tensor&, int64_t, int64_t, std::string_view, SymInt, int64_t);
  using Accumulate =
      StateTensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, SymInt);
  using Merge =
      void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&);
  static const auto compute_scores = op_handle<Scores>("htree::io_compute_scores");
  static const auto select_topk = op_handle<Select>("htree::io_select_topk");
  static const auto mask = op_handle<void(const Tensor&, const Tensor&)>("htree::mask_topk_scores_");
  static const auto accumulate = op_handle<Accumulate>("htree::io_accumulate_non_topk");
  static const auto merge = op_handle<Merge>("htree::merge_to_global_");
  static const auto next_parents =
      op_handle<Tensor(const Tensor&, const Tensor&, int64_t, bool)>("htree::io_compute_next_parents");

  const int64_t r = options.compression_rate;
  const auto [scores, count] = compute_scores.call(queries, layer.keys, parents, table.select(0, 0),
                                                   table.select(0, 1), layer_idx, r, options.scale, t0);
  Tensor next;
  if (layer_idx > 0) {
    const Tensor positions =
        select_topk.call(scores, count, options.top_k, layer_idx, select, t0, /*fold_mask=*/0);
    mask.call(scores, positions);
    next = next_parents.call(parents, positions, r, map_positions);
  }
  const auto [lmax, lsum, lout] = accumulate.call(layer.values, parents, scores, count, layer_idx, r, t0);
  const auto& [gmax, gsum, gout] = state;
  merge.call(gmax, gsum, gout, lmax, lsum, lout);
  return next;
}

// for rows of at most 1 GiB of scores:
//   parents = top_parents(...); state = (-inf, 0, 0)
//   for l = L-1 ... 0:
//     scores, n = io_compute_scores(q, K[l], parents, cos, sin, l, r, scale, t0)
//     if l: pos = io_select_topk(scores, n, k, l, select, t0)
//           mask_topk_scores_(scores, pos)
//     merge_to_global_(*state, *io_accumulate_non_topk(V[l], parents, scores, n, l, r, t0))
//     if l: parents = io_compute_next_parents(parents, pos, r, map_positions)
//   out[rows] = final_normalize(state out, state sum, q.dtype)
Tensor io_attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, int64_t compression_rate,
                            int64_t max_top_nodes, int64_t top_k, std::optional<double> scale,
                            std::string_view select, bool map_positions) {
  static const auto normalize =
      op_handle<Tensor(const Tensor&, const Tensor&, std::optional<at::ScalarType>)>(
          "htree::final_normalize");
  const TreeOptions options = io_options(compression_rate, max_top_nodes, top_k, scale);
  Tensor out = prepare_io_attention(q, k, v, options, select);
  if (out.numel() == 0) {
    return out;
  }
  const std::vector<Layer> layers = build_layers(k, v, options);
  const auto depth = static_cast<int64_t>(layers.size());
  const Tensor table = rope_cache(top_k * compression_rate, q.size(3), q);
  const at::ScalarType wide = state_dtype(q);
  const int64_t row_bytes =
      q.size(0) * q.size(2) * top_k * compression_rate * static_cast<int64_t>(c10::elementSize(wide));
  const int64_t step = std::max<int64_t>(1, kMaxScoreBytes / row_bytes);
  const int64_t before = k.size(1) - q.size(1);
  for (int64_t first = 0; first < q.size(1); first += step) {
    const int64_t rows = std::min(step, q.size(1) - first);
    const Tensor queries = q.narrow(1, first, rows);
    const at::TensorOptions kind = q.options().dtype(wide);
    const StateTensors state = {
        at::full({q.size(0), rows, q.size(2)}, -std::numeric_limits<double>::infinity(), kind),
        at::zeros({q.size(0), rows, q.size(2)}, kind),
        at::zeros({q.size(0), rows, q.size(2), v.size(3)}, kind)};
    Tensor parents = top_parents(queries, k.size(2), options, depth, before + first);
    for (int64_t layer = depth - 1; layer >= 0; --layer) {
      parents = visit_layer(queries, layers[static_cast<size_t>(layer)], layer, parents, table, options,
                            select, map_positions, before + first, state);
    }
    out.narrow(1, first, rows).copy_(normalize.call(std::get<2>(state), std::get<1>(state), q.scalar_type()));
  }
  return out;
}

Tensor io_attention_forward_meta(const Tensor& q, const Tensor& k, const Tensor& v, int64_t compression_rate,
                                 int64_t max_top_nodes, int64_t top_k, std::optional<double> scale,
                                 std::string_view select, bool /*map_positions*/) {
  return prepare_io_attention(q, k, v, io_options(compression_rate, max_top_nodes, top_k, scale), select);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(library,
             {
                 "io_attention_forward(Tensor q, Tensor k, Tensor v, int compression_rate=16, int "
                 "max_top_nodes=8192, int top_k_per_layer=512, float? scale=None, str select=\"lcg\", "
                 "bool map_positions=False) -> Tensor",
             });
  OpKernels(library, DispatchKey::CPU).impl("io_attention_forward", TORCH_FN(io_attention_forward));
#if defined(HTREE_WITH_CUDA)
  OpKernels(library, DispatchKey::CUDA).impl("io_attention_forward", TORCH_FN(io_attention_forward));
#endif
  OpKernels(library, DispatchKey::Meta).impl("io_attention_forward", TORCH_FN(io_attention_forward_meta));
  register_no_gradient(library, {"io_attention_forward"});
}

}  // namespace htree::tree_attention
