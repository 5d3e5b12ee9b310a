#include "ops/tree/cuda/cuda_tree.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>

#include "host/cuda/hopper.h"

namespace htree::tree_attention {
namespace {

// Whether every row of x [B, rows, heads, D] starts at a multiple of 16 bytes.
bool aligned_rows(const Tensor& x) {
  const auto whole = [&](int64_t dim) { return x.size(dim) == 1 || x.stride(dim) % 8 == 0; };
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 && whole(0) && whole(1) && whole(2);
}

Tensor device_bytes(int64_t bytes, const Tensor& like) {
  return at::empty({std::max<int64_t>(bytes, 1)}, like.options().dtype(at::kByte));
}

}  // namespace

DeviceFacts current_device_facts() {
  const cudaDeviceProp* properties = at::cuda::getCurrentDeviceProperties();
  return {properties->major, static_cast<int64_t>(properties->sharedMemPerBlockOptin), has_hopper_kernels(),
          properties->multiProcessorCount};
}

TensorView aligned_view_of(const Tensor& x) {
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2), aligned_rows(x)};
}

DenseTiles lay_out_tiles(const AttentionProblem& problem, int64_t rows, char* memory) {
  DenseTiles tiles;
  tiles.num_tiles = static_cast<int>(ceil_div(rows, kDenseTileNodes));
  const int64_t count = problem.batch * problem.num_kv_heads * tiles.num_tiles;
  tiles.keys = memory;
  tiles.values = tiles.keys + count * dense_tile_bytes(problem.key_dim);
  tiles.scales = reinterpret_cast<float*>(tiles.values + count * dense_tile_bytes(problem.value_dim));
  tiles.flags = reinterpret_cast<int32_t*>(tiles.scales + count * kDenseTileNodes);
  return tiles;
}

AttentionProblem attention_problem(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const AttentionArgs& args) {
  AttentionProblem problem;
  problem.batch = q.size(0);
  problem.num_keys = k.size(1);
  problem.num_queries = q.size(1);
  problem.num_heads = q.size(2);
  problem.num_kv_heads = k.size(2);
  problem.key_dim = q.size(3);
  problem.value_dim = v.size(3);
  problem.half_dtype = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  problem.args = args;
  return problem;
}

CudaTree build_cuda_tree(const Tensor& k, const Tensor& v, const AttentionArgs& args) {
  const int64_t layers = num_layers(k.size(1), args.max_top_nodes, args.compression_rate);
  CudaTree tree{{k}, {v}};
  for (int64_t layer = 1; layer < layers; ++layer) {
    const int64_t nodes = ceil_div(tree.keys.back().size(1), args.compression_rate);
    Tensor keys = at::empty({k.size(0), nodes, k.size(2), k.size(3)}, k.options());
    Tensor values = at::empty({v.size(0), nodes, v.size(2), v.size(3)}, v.options());
    tree_build_cuda(tree.keys.back(), tree.values.back(), args.compression_rate, keys, values);
    tree.keys.push_back(keys);
    tree.values.push_back(values);
  }
  return tree;
}

Tensor build_span_means(const Tensor& k, const AttentionArgs& args) {
  if (args.selection_span == 0) {
    return {};
  }
  Tensor means =
      at::empty({k.size(0), ceil_div(k.size(1), args.selection_span), k.size(2), k.size(3)}, k.options());
  span_means_cuda(k, args.selection_span, means);
  return means;
}

TensorCoreTree prepare_tensor_cores(const AttentionProblem& problem, const TreeConfig& config,
                                    const Tensor& q, const CudaTree& tree, bool selects,
                                    cudaStream_t stream) {
  TensorCoreTree result;
  TreeCall& call = result.call;
  call.problem = problem;
  call.config = config;
  call.shape = {q.scalar_type() == at::kHalf ? HalfType::kHalf : HalfType::kBFloat16,
                static_cast<int>(problem.key_dim), static_cast<int>(problem.value_dim)};
  call.queries = aligned_view_of(q);
  const auto own = [&](int64_t bytes) {
    result.memory.push_back(device_bytes(bytes, q));
    return result.memory.back().mutable_data_ptr();
  };
  if (!problem.args.inv_freq.empty()) {
    call.inv_freq = static_cast<double*>(own(problem.key_dim / 2 * sizeof(double)));
  }
  call.rope = static_cast<float2*>(own(call.rope_rows() * problem.key_dim / 2 * sizeof(float2)));
  const int64_t table_bytes = rotation_table_bytes(call.rotation_slots(), problem.key_dim);
  if (config.fragment_rotations) {
    call.fragment_rotations = static_cast<__half2*>(own(table_bytes));
  }
  if (config.dim_rotations) {
    call.dim_rotations = static_cast<__half2*>(own(table_bytes));
  }
  const int64_t tiled = tiled_tokens(problem, config);
  const int64_t tile_bytes = dense_layer_bytes(problem, tiled);
  const bool shares = config.masked_rows > 0;  // tiles and packed tokens, one after the other
  for (size_t i = 0; i < tree.keys.size(); ++i) {
    TreeLayer layer;
    layer.keys = aligned_view_of(tree.keys[i]);
    layer.values = aligned_view_of(tree.values[i]);
    layer.num_nodes = tree.keys[i].size(1);
    layer.num_parents = ceil_div(layer.num_nodes, kTensorCoreRate);
    layer.node_span = node_span(kTensorCoreRate, static_cast<int64_t>(i));
    if (i == 0 ? gathers_tokens(problem, config) : walks(problem, config)) {
      const int64_t bytes = packed_layer_bytes(problem, static_cast<int64_t>(i));
      layer.packed = static_cast<char*>(own(i == 0 && shares ? std::max(bytes, tile_bytes) : bytes));
    }
    call.layers.push_back(layer);
  }
  if (tiled > 0) {
    char* packed = call.layers.front().packed;
    call.rows =
        lay_out_tiles(problem, tiled, shares && packed ? packed : static_cast<char*>(own(tile_bytes)));
  }
  if (config.dense_top) {
    const int64_t nodes = call.layers.back().num_nodes;
    call.top = lay_out_tiles(problem, nodes, static_cast<char*>(own(dense_layer_bytes(problem, nodes))));
  }
  for (size_t i = 1; selects && walks(problem, config) && i < tree.keys.size(); ++i) {
    const int64_t rows = span_rows(problem, static_cast<int64_t>(i));
    TreeLayer& layer = call.layers[i];
    if (rows == 1) {
      continue;  // the stored mean is the score
    }
    if (config.dense_top && dense_span_shape(problem) && i + 1 == tree.keys.size()) {
      SpanTiles& top = call.top_spans;
      top.tiling = span_tiling(rows);
      top.num_tiles = static_cast<int>(top.tiling.groups(layer.num_nodes) << top.tiling.tiles_log2);
      const int64_t tiles = problem.batch * problem.num_kv_heads * top.num_tiles;
      top.keys = static_cast<char*>(own(tiles * dense_tile_bytes(problem.key_dim)));
      top.scales = static_cast<float*>(own(tiles * kDenseTileNodes * sizeof(float)));
      top.scaled = static_cast<int32_t*>(own(tiles * sizeof(int32_t)));
    } else {
      const int64_t blocks = problem.batch * problem.num_kv_heads * layer.num_parents * rows;
      layer.spans = {static_cast<char*>(own(blocks * packed_span_bytes(problem.key_dim))),
                     static_cast<int>(rows), layer.num_parents};
    }
  }
  run_prepare(call, stream);
  return result;
}

Tensor given_frequencies(const std::vector<double>& inv_freq, const Tensor& like, cudaStream_t stream) {
  if (inv_freq.empty()) {
    return {};
  }
  const auto count = static_cast<int64_t>(inv_freq.size());
  Tensor frequencies = at::empty({count}, like.options().dtype(at::kDouble));
  C10_CUDA_CHECK(launch_frequencies(frequencies.mutable_data_ptr<double>(), inv_freq.data(), count, stream));
  return frequencies;
}

RopeTables general_rope_tables(const AttentionProblem& problem, const Tensor& q, cudaStream_t stream) {
  if (!problem.args.rotate) {
    return {};
  }
  const auto options = q.options().dtype(at::kDouble);
  Tensor frequencies = given_frequencies(problem.args.inv_freq, q, stream);
  if (!frequencies.defined()) {
    const Tensor exponent =
        at::arange(0, problem.key_dim, 2, options).div(-static_cast<double>(problem.key_dim));
    frequencies = at::pow(problem.args.rope_base, exponent);
  }
  const Tensor angle = at::outer(at::arange(rotated_positions(problem), options), frequencies);
  return {angle.cos().to(at::kFloat), angle.sin().to(at::kFloat)};
}

LayerArgs layer_args(const AttentionProblem& problem, int64_t layer, int64_t first_query) {
  LayerArgs args;
  args.layer = layer;
  args.compression_rate = problem.args.compression_rate;
  args.list_width = layer + 1 == problem.layers() ? list_capacity(problem) : problem.args.top_k;
  args.top_k = problem.args.top_k;
  args.t0 = problem.token_of(first_query);
  args.selection_stride = problem.args.selection_stride;
  args.scale = problem.args.scale;
  args.selection = problem.args.selection;
  args.selection_span = problem.args.selection_span;
  return args;
}

}  // namespace htree::tree_attention
