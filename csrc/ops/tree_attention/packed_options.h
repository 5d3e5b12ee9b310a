// The options as the dispatcher passes them. An op that takes all options takes them packed, as its last two arguments
// (kPackedSchema), and its name begins with an underscore. The ops of the design documents take each option by its own
// name, and do nothing but call the op with packed ones.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host/op_handle.h"
#include "ops/tree/options.h"

namespace htree::tree_attention {

// ---- packed

constexpr const char* kPackedSchema = "int[] option_ints, float[] option_floats";

// The options in the order of the table. An option that may be None is a 0 or a 1 among the ints, and follows only
// behind a 1. Ints, bools and the places of words stand among the ints, numbers among the floats, and a list of numbers
// is its length and then the numbers. htree_ops/ops/tree_attention/options.py packs alike.
struct PackedOptions {
  std::vector<int64_t> ints;
  std::vector<double> floats;
};
PackedOptions pack_options(const TreeOptions& options);
// Raises ValueError where the numbers are not those of packed options; their ranges are left to check_options().
TreeOptions unpack_options(at::IntArrayRef ints, at::ArrayRef<double> floats);

// In the `saved_data` of autograd.
template <typename SavedData>
void save_options(SavedData& data, const TreeOptions& options) {
  PackedOptions packed = pack_options(options);
  data["option_ints"] = std::move(packed.ints);
  data["option_floats"] = std::move(packed.floats);
}
template <typename SavedData>
TreeOptions load_options(SavedData& data) {
  return unpack_options(data["option_ints"].toIntVector(), data["option_floats"].toDoubleVector());
}

// The kernel to register for a function that takes the options first: TORCH_FN(kPacked<function>).
template <auto kFunction, typename Function = decltype(kFunction)>
struct PackedKernel;
template <auto kFunction, typename Result, typename... Arguments>
struct PackedKernel<kFunction, Result (*)(const TreeOptions&, Arguments...)> {
  static Result call(Arguments... arguments, at::IntArrayRef ints, at::ArrayRef<double> floats) {
    return kFunction(unpack_options(ints, floats), arguments...);
  }
};
template <auto kFunction>
constexpr auto* kPacked = &PackedKernel<kFunction>::call;

// An op with packed options, called with them first; keep it in a function-local static.
template <typename Signature>
class PackedOp;
template <typename Result, typename... Arguments>
class PackedOp<Result(Arguments...)> {
 public:
  explicit PackedOp(const char* name) : handle_(op_handle<Signature>(name)) {}
  Result operator()(const TreeOptions& options, Arguments... arguments) const {
    const PackedOptions packed = pack_options(options);
    return handle_.call(arguments..., packed.ints, packed.floats);
  }

 private:
  using Signature = Result(Arguments..., at::IntArrayRef, at::ArrayRef<double>);
  c10::TypedOperatorHandle<Signature> handle_;
};

// ---- by name

// "int compression_rate=16, int max_top_nodes=8192, ...": the options of the design documents, and those that came later.
std::string documented_schema();
std::string later_schema();

// Registers the op `name`, which the op `packed` ("htree::_attention") computes: the arguments that are options are packed,
// the others stay in their order. Autograd, autocast, Meta and compilers see the packed op alone. `function` is what its
// messages begin with.
void register_by_name(torch::Library& library, const char* name, const char* packed, const char* function);

}  // namespace htree::tree_attention
