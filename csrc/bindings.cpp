// The module `_host`: build facts for people and tests, never on a model's path. The package works without
// it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#if defined(HTREE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

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

}  // namespace

PYBIND11_MODULE(_host, module) {
  module.doc() = "Build facts, device facts and compiled kernel configurations of htree_ops.";
  module.def("build_facts", &build_facts, "How the library was built, as strings.");
  module.def("device_facts", &device_facts, "Name, capability and sizes of each visible GPU.");
}
