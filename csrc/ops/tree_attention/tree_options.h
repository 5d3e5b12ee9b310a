// The options of tree attention, from the schema to the kernels and through autograd. To add an option, add
// it to this struct; nothing else on that way changes. AttentionArgs has the resolved options.
//
// A schema has the older options before the op's last argument (store_parents, output_mask) and the later
// ones behind it, so that positional calls keep their meaning. A new option goes to the end of `Later`.
#pragma once

#include <ATen/core/ivalue.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "host/op_handle.h"

namespace htree::tree_attention {

struct TreeOptions {
  // The options as the dispatcher passes them, in the order of the schema.
  using Loose = std::tuple<int64_t, int64_t, int64_t, std::optional<double>, std::optional<double>,
                           std::string_view, int64_t>;
  using Later = std::tuple<std::optional<int64_t>, std::optional<at::ArrayRef<double>>, bool>;
  static constexpr const char* kSchema =
      "int compression_rate=16, int max_top_nodes=8192, int top_k_per_layer=512, float? scale=None, "
      "float? rope_base=10000., str importance=\"lse_causal\", int selection_stride=1";
  static constexpr const char* kLaterSchema =
      "int? selection_span=None, float[]? inv_freq=None, bool open_next=False";
  static constexpr std::array<const char*, std::tuple_size_v<Loose> + std::tuple_size_v<Later>> kNames = {
      "compression_rate", "max_top_nodes",    "top_k_per_layer", "scale",    "rope_base",
      "importance",       "selection_stride", "selection_span",  "inv_freq", "open_next"};

  int64_t compression_rate = 16;
  int64_t max_top_nodes = 8192;
  int64_t top_k = 512;
  std::optional<double> scale;
  std::optional<double> rope_base = 10000.0;
  std::string importance = "lse_causal";
  int64_t selection_stride = 1;
  std::optional<int64_t> selection_span;
  std::optional<std::vector<double>> inv_freq;
  bool open_next = false;

  TreeOptions() = default;
  TreeOptions(const Loose& loose, const Later& later) {
    std::tie(compression_rate, max_top_nodes, top_k, scale, rope_base, importance, selection_stride) = loose;
    std::optional<at::ArrayRef<double>> frequencies;
    std::tie(selection_span, frequencies, open_next) = later;
    if (frequencies.has_value()) inv_freq = frequencies->vec();
  }
  Loose loose() const {
    return {compression_rate, max_top_nodes, top_k, scale, rope_base, importance, selection_stride};
  }
  Later later() const { return {selection_span, inv_freq, open_next}; }

  // Writes the options to the `saved_data` of autograd.
  template <typename SavedData>
  void save(SavedData& data) const {
    size_t i = 0;
    std::apply([&](const auto&... option) { ((data[kNames[i++]] = to_value(option)), ...); },
               std::tuple_cat(loose(), later()));
  }
  template <typename SavedData>
  static TreeOptions load(SavedData& data) {
    constexpr size_t kFirst = std::tuple_size_v<Loose>;
    const auto loose = load<Loose, 0>(data, std::make_index_sequence<kFirst>());
    const auto later = load<Later, kFirst>(data, std::make_index_sequence<std::tuple_size_v<Later>>());
    return {loose, later};
  }

 private:
  template <typename T>
  static c10::IValue to_value(const T& option) {
    if constexpr (std::is_same_v<T, std::string_view>) {
      return c10::IValue(std::string(option));
    } else {
      return c10::IValue(option);
    }
  }
  // An IValue has no array of doubles to point at, so a list is copied.
  template <typename T>
  static auto from_value(const c10::IValue& value) {
    if constexpr (std::is_same_v<T, std::string_view>) {
      return std::string_view(value.toStringRef());
    } else if constexpr (std::is_same_v<T, std::optional<at::ArrayRef<double>>>) {
      return value.to<std::optional<std::vector<double>>>();
    } else {
      return value.to<T>();
    }
  }
  template <typename Options, size_t kFirst, typename SavedData, size_t... kIndex>
  static auto load(SavedData& data, std::index_sequence<kIndex...>) {
    return std::make_tuple(
        from_value<std::tuple_element_t<kIndex, Options>>(data[kNames[kFirst + kIndex]])...);
  }
};

// Converts between functions that take a TreeOptions and the dispatcher, which passes each option separately.
template <typename Before, typename Options, typename After, typename Later>
struct LooseCall;

template <typename... Before, typename... Option, typename... After, typename... Late>
struct LooseCall<std::tuple<Before...>, std::tuple<Option...>, std::tuple<After...>, std::tuple<Late...>> {
  template <typename Result>
  using Signature = Result(Before..., Option..., After..., Late...);

  template <typename Result, auto kFunction>
  static Result kernel(Before... before, Option... option, After... after, Late... late) {
    return kFunction(before..., TreeOptions({option...}, {late...}), after...);
  }

  template <typename Handle>
  static auto call(const Handle& handle, Before... before, const TreeOptions& options, After... after) {
    return std::apply(
        [&](const auto&... option) {
          return std::apply(
              [&](const auto&... late) { return handle.call(before..., option..., after..., late...); },
              options.later());
        },
        options.loose());
  }
};

// The arguments of a function, split into those before and those behind its TreeOptions.
template <typename Before, typename Rest>
struct CutAtOptions;
template <typename... Before, typename... After>
struct CutAtOptions<std::tuple<Before...>, std::tuple<const TreeOptions&, After...>> {
  using Call = LooseCall<std::tuple<Before...>, TreeOptions::Loose, std::tuple<After...>, TreeOptions::Later>;
};
template <typename... Before, typename Next, typename... Rest>
struct CutAtOptions<std::tuple<Before...>, std::tuple<Next, Rest...>>
    : CutAtOptions<std::tuple<Before..., Next>, std::tuple<Rest...>> {};

template <auto kFunction, typename Function = decltype(kFunction)>
struct LooseKernel;
template <auto kFunction, typename Result, typename... Arguments>
struct LooseKernel<kFunction, Result (*)(Arguments...)> {
  using Call = typename CutAtOptions<std::tuple<>, std::tuple<Arguments...>>::Call;
  static constexpr auto* kPointer = &Call::template kernel<Result, kFunction>;
};
// The kernel to register for a function that takes a TreeOptions: TORCH_FN(kLoose<function>).
template <auto kFunction>
constexpr auto* kLoose = LooseKernel<kFunction>::kPointer;

// An op whose options come as a TreeOptions; keep it in a function-local static.
template <typename Signature>
class TreeOp;
template <typename Result, typename... Arguments>
class TreeOp<Result(Arguments...)> {
  using Call = typename CutAtOptions<std::tuple<>, std::tuple<Arguments...>>::Call;

 public:
  explicit TreeOp(const char* name) : handle_(op_handle<typename Call::template Signature<Result>>(name)) {}
  Result operator()(Arguments... arguments) const { return Call::call(handle_, arguments...); }

 private:
  c10::TypedOperatorHandle<typename Call::template Signature<Result>> handle_;
};

}  // namespace htree::tree_attention
