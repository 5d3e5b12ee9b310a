// The module `_host`: build facts for people and tests, never on a model's path. The package works without
// it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#if defined(HTREE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

#include "ops/causal_softmax/causal_softmax_config.h"
#include "ops/rmsnorm_rope/rmsnorm_rope_config.h"
#include "ops/tree_attention/attention/attention_config.h"

namespace py = pybind11;

namespace {

std::map<std::string, std::string> build_facts() {
  return {{"version", HTREE_VERSION},
          {"torch", HTREE_TORCH},
          {"nvcc", HTREE_NVCC},
          {"arch_list", HTREE_ARCH_LIST},
          {"compiler", __VERSION__}};
}

// One dictionary per visible GPU; empty without CUDA or without a GPU.
std::vector<py::dict> device_facts() {
  std::vector<py::dict> devices;
#if defined(HTREE_WITH_CUDA)
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    return devices;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      continue;
    }
    py::dict facts;
    facts["name"] = properties.name;
    facts["capability"] = py::make_tuple(properties.major, properties.minor);
    facts["multiprocessors"] = properties.multiProcessorCount;
    facts["memory_bytes"] = properties.totalGlobalMem;
    facts["l2_bytes"] = properties.l2CacheSize;
    facts["shared_bytes_per_block"] = properties.sharedMemPerBlockOptin;
    devices.push_back(facts);
  }
#endif
  return devices;
}

// What the dispatch of each room chooses over its range of problems: pure functions, printable without a GPU.
std::map<std::string, std::vector<std::string>> kernel_configurations() {
  std::map<std::string, std::vector<std::string>> rooms;
#if defined(HTREE_WITH_CUDA)
  auto& softmax = rooms["causal_softmax"];
  for (int block_size : {0, 512, 1024}) {
    for (bool vectorised : {true, false}) {
      for (int64_t cols = 256; cols <= 65536; cols *= 2) {
        const auto text = htree::causal_softmax::describe(
            htree::causal_softmax::choose_config(cols, vectorised, block_size));
        if (std::find(softmax.begin(), softmax.end(), text) == softmax.end()) {
          softmax.push_back(text);
        }
      }
    }
  }
  auto& attention = rooms["tree_attention"];
  attention.push_back(
      "tensor_core: fp16, bf16; r = 16; K = V = 32, 64, 128; H / H_kv <= 16; k <= 1024; sm_80 and later");
  attention.push_back("tensor_core gather=union: the same shapes, forward; sm_90a");
  attention.push_back("general: fp32, fp16, bf16; every other shape");
  auto& norm = rooms["rmsnorm_rope"];
  for (int64_t width = 32; width <= 65536; width *= 2) {
    const auto config = htree::rmsnorm_rope::choose_config(width, std::min<int64_t>(width, 128),
                                                           /*element_size=*/2, /*vectorised=*/true,
                                                           /*backward=*/false);
    norm.push_back(htree::rmsnorm_rope::describe(config));
  }
  norm.erase(std::unique(norm.begin(), norm.end()), norm.end());
#endif
  return rooms;
}

// (threads per row, rows per block, elements per thread, vectorised) for rows of `cols` elements.
std::tuple<int, int, int, bool> causal_softmax_config(int64_t cols, bool vectorised, int block_size) {
  const auto config = htree::causal_softmax::choose_config(cols, vectorised, block_size);
  return {config.threads, config.rows_per_block, config.elems_per_thread, config.vectorised};
}

// (threads per row, pairs of packs per thread, stages, vectorised) for rows of `width` elements.
std::tuple<int, int, int, bool> rmsnorm_rope_config(int64_t width, int64_t head_dim, int element_size,
                                                    bool vectorised, bool backward) {
  const auto config = htree::rmsnorm_rope::choose_config(width, head_dim, element_size, vectorised, backward);
  return {config.threads, config.pairs, config.stages, config.vectorised};
}

// The path and chunks of one attention call on a GPU of that capability and shared memory per block.
std::string tree_attention_config(const std::array<int64_t, 7>& sizes, bool half_dtype,
                                  int64_t compression_rate, int64_t max_top_nodes, int64_t top_k,
                                  int64_t selection_stride, bool backward, int major, int64_t shared_bytes,
                                  bool hopper_kernels) {
  using namespace htree::tree_attention;
  AttentionProblem p;
  std::tie(p.batch, p.num_keys, p.num_queries, p.num_heads, p.num_kv_heads, p.key_dim, p.value_dim) =
      std::tuple_cat(sizes);
  p.half_dtype = half_dtype;
  p.args.compression_rate = compression_rate;
  p.args.max_top_nodes = max_top_nodes;
  p.args.top_k = top_k;
  p.args.selection_stride = selection_stride;
  const DeviceFacts device{major, shared_bytes, major == 9 && hopper_kernels};
  return describe(backward ? choose_backward_config(p, device) : choose_attention_config(p, device));
}

}  // namespace

PYBIND11_MODULE(_host, module) {
  module.doc() = "Build facts, device facts and compiled kernel configurations of htree_ops.";
  module.def("build_facts", &build_facts, "How the library was built, as strings.");
  module.def("kernel_configurations", &kernel_configurations,
             "Compiled CUDA configurations by room; empty without.");
  module.def("causal_softmax_config", &causal_softmax_config, py::arg("cols"), py::arg("vectorised"),
             py::arg("block_size") = 0, "The kernel that causal_softmax takes for rows of `cols` elements.");
  module.def("rmsnorm_rope_config", &rmsnorm_rope_config, py::arg("width"), py::arg("head_dim"),
             py::arg("element_size"), py::arg("vectorised"), py::arg("backward") = false,
             "The kernel that rmsnorm_rope takes for rows of `width` elements.");
  module.def("tree_attention_config", &tree_attention_config, py::arg("sizes"), py::arg("half_dtype"),
             py::arg("compression_rate") = 16, py::arg("max_top_nodes") = 8192, py::arg("top_k") = 512,
             py::arg("selection_stride") = 1, py::arg("backward") = false, py::arg("major") = 9,
             py::arg("shared_bytes") = 232448, py::arg("hopper_kernels") = true,
             "The path and chunks of an attention call; sizes are (B, T, T_q, H, H_kv, K, V).");
  module.def("device_facts", &device_facts, "Name, capability and sizes of each visible GPU.");
}
