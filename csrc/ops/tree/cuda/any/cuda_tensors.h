// Turns checked tensors into what the launchers take. Only the *_cuda.cpp files include this.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "host/cuda/device_type.h"
#include "host/cuda/launch_scope.h"
#include "host/dispatch.h"
#include "ops/tree/cuda/any/geometry.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

// Calls f(Type<T>{}), T being the device type of `dtype`.
template <typename List, typename F>
void dispatch_device_dtype(const char* op, at::ScalarType dtype, List list, F&& f) {
  dispatch_dtype(op, dtype, list, [&](auto tag) { f(Type<DeviceType<typename decltype(tag)::type>>{}); });
}

template <typename T>
const T* input(const at::Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <typename T>
T* output(const at::Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

template <typename T>
View<const T> input_view(const at::Tensor& t) {
  return {input<T>(t), t.stride(0), t.stride(1), t.stride(2)};
}

template <typename T>
View<T> output_view(const at::Tensor& t) {
  return {output<T>(t), t.stride(0), t.stride(1), t.stride(2)};
}

// Undefined tensors mean no rotation.
template <typename A>
RotaryTable<A> rotary_table(const at::Tensor& cos, const at::Tensor& sin) {
  if (!cos.defined()) {
    return {};
  }
  return {input<A>(cos), input<A>(sin), cos.stride(0), sin.stride(0)};
}

// The rows of a whole call. `lists_per_kv_head` is 1 where the query heads of a kv head share a list,
// else H / H_kv.
inline Geometry geometry_of(const LayerArgs& args, int64_t num_batches, int64_t num_queries,
                            int64_t num_lists, int64_t group, int64_t lists_per_kv_head, int64_t num_nodes) {
  Geometry geometry;
  geometry.num_batches = num_batches;
  geometry.num_queries = num_queries;
  geometry.num_lists = num_lists;
  geometry.group = group;
  geometry.lists_per_kv_head = lists_per_kv_head;
  geometry.rate = args.compression_rate;
  geometry.list_width = args.list_width;
  geometry.num_nodes = num_nodes;
  geometry.node_span = node_span(args.compression_rate, args.layer);
  geometry.t0 = args.t0;
  geometry.query_step = 1;
  geometry.queries_per_list = args.selection_stride;
  return geometry;
}

// `bytes` of device scratch; undefined where there are none.
inline at::Tensor device_scratch(int64_t bytes, const at::Tensor& like) {
  return bytes == 0 ? at::Tensor() : at::empty({bytes}, like.options().dtype(at::kByte));
}
inline void* scratch_pointer(const at::Tensor& scratch) {
  return scratch.defined() ? scratch.mutable_data_ptr() : nullptr;
}

}  // namespace htree::tree_attention
