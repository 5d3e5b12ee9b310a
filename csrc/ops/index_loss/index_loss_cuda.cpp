// CUDA entry points of index_loss: the statistics of the attention, then ranges of blocks, whose masses and scores are held
// and reduced by the launches behind. docs/semantics/index_loss.md §9.3
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "ops/index_loss/cuda/any/loss_params.h"
#include "ops/index_loss/index_loss.h"
#include "ops/index_loss/index_loss_plan.h"
#include "ops/tree/cuda/any/cuda_tensors.h"
#include "ops/tree/documents.h"

namespace htree::index_loss {
namespace {

using tree_attention::device_scratch;
using tree_attention::dispatch_device_dtype;
using tree_attention::input;
using tree_attention::input_view;
using tree_attention::output;
using tree_attention::output_view;

constexpr double kLog2e = 1.4426950408889634;

LossProblem problem_of(const Call& call) {
  return {call.batch(),
          call.rows(),
          call.tokens(),
          call.heads(),
          call.kv_heads(),
          call.index_heads(),
          call.key_dim(),
          call.block_size,
          call.query.element_size() == 2,
          at::cuda::getCurrentDeviceProperties()->major};
}

// A range of blocks: what is reduced, and the columns that are held for it.
struct Range {
  int64_t first_block, last_block;
  int64_t first_column, last_column;
};

// The launches of a call, in their order.
template <typename T>
class Launches {
 public:
  Launches(const Call& call, cudaStream_t stream)
      : call_(call), stream_(stream), plan_(plan_loss(problem_of(call))) {
    table_ = device_scratch(call.batch() * call.rows() * static_cast<int64_t>(sizeof(LossRow)), call.query);
    counted_ = at::zeros({1}, call.positions.options().dtype(at::kInt));
    LossRowParams params;
    params.positions = input<int64_t>(call.positions);
    if (call.cu_seqlens.defined()) {
      const int64_t tokens = call.tokens();
      // Ascending within the tensors, whatever the caller wrote: kernels rely on it.
      offsets_ =
          tree_attention::device_offsets({call.cu_seqlens, call.cu_seqlens, tokens, tokens}, tokens, tokens,
                                         /*stride=*/1)
              .starts_q.contiguous();
      params.cu_seqlens = input<int32_t>(offsets_);
      params.num_documents = static_cast<int32_t>(offsets_.size(0) - 1);
    }
    params.batch = static_cast<int32_t>(call.batch());
    params.rows = static_cast<int32_t>(call.rows());
    params.tokens = static_cast<int32_t>(call.tokens());
    params.block_size = static_cast<int32_t>(call.block_size);
    params.unit = static_cast<int32_t>(plan_.unit);
    params.table = static_cast<LossRow*>(table_.mutable_data_ptr());
    params.counted = output<int32_t>(counted_);
    C10_CUDA_CHECK(launch_loss_rows(params, stream_));
  }

  void forward(const Results& results) {
    const auto& [loss, lse, index_lse] = results;
    const Tensor states =
        device_scratch(rows() * call_.index_heads() * 4 * static_cast<int64_t>(sizeof(float)), lse);
    auto* of_rows = static_cast<LossState*>(states.mutable_data_ptr());
    for_batches([&](int64_t first_batch, int64_t num_batches) {
      attend(first_batch, num_batches, lse);
      for_ranges(first_batch, num_batches, lse,
                 [&](const LossSpan& span, const HeldColumns& held, const Range&) {
                   C10_CUDA_CHECK(launch_row_losses({span, held, of_rows}, stream_));
                 });
    });
    MeanParams params;
    params.states = of_rows;
    params.table = table();
    params.counted = input<int32_t>(counted_);
    params.num_rows = rows();
    params.index_heads = static_cast<int32_t>(call_.index_heads());
    params.index_lse = output<float>(index_lse);
    params.loss = output<float>(loss);
    C10_CUDA_CHECK(launch_mean_loss(params, stream_));
  }

  void backward(const Tensor& lse, const Tensor& index_lse, const Tensor& dloss, const Gradients& gradients) {
    const auto& [of_query, of_key] = gradients;
    const Tensor row_sums = device_scratch(
        rows() * call_.index_heads() * call_.index_dim() * static_cast<int64_t>(sizeof(float)), lse);
    KeyGradientParams<T> params;
    params.of.query = input_view<T>(call_.index_query);
    params.of.key = input_view<T>(call_.index_key);
    params.of.index_lse = input<float>(index_lse);
    params.of.dloss = input<float>(dloss);
    params.of.counted = input<int32_t>(counted_);
    params.of.row_sums = static_cast<float*>(row_sums.mutable_data_ptr());
    params.of.d = static_cast<int32_t>(call_.index_dim());
    for_batches([&](int64_t first_batch, int64_t num_batches) {
      for_ranges(first_batch, num_batches, lse,
                 [&](const LossSpan& span, const HeldColumns& held, const Range& range) {
                   params.of.span = span;
                   params.of.held = held;
                   C10_CUDA_CHECK(launch_row_gradients(params.of, stream_));
                   if (of_key.defined()) {
                     params.gradient = output_view<T>(of_key);
                     params.first_token = static_cast<int32_t>(range.first_block * call_.block_size);
                     params.last_token =
                         static_cast<int32_t>(std::min(range.last_block * call_.block_size, call_.tokens()));
                     C10_CUDA_CHECK(launch_key_gradient(params, stream_));
                   }
                 });
    });
    if (of_query.defined()) {
      store_query_gradient(params.of, of_query);
    }
  }

 private:
  int64_t rows() const { return call_.batch() * call_.rows(); }
  const LossRow* table() const { return static_cast<const LossRow*>(table_.const_data_ptr()); }
  int64_t all_parts() const { return call_.kv_heads() * plan_.parts; }

  template <typename F>
  void for_batches(const F& f) const {
    for (int64_t first = 0; first < call_.batch(); first += plan_.batches) {
      f(first, std::min(plan_.batches, call_.batch() - first));
    }
  }

  LossSpan span_of(int64_t first_batch, int64_t num_batches, int64_t first_column, int64_t last_column,
                   int64_t split_columns) const {
    LossSpan span;
    span.table = table();
    span.rows = static_cast<int32_t>(call_.rows());
    span.first_batch = static_cast<int32_t>(first_batch);
    span.num_batches = static_cast<int32_t>(num_batches);
    span.block_size = static_cast<int32_t>(call_.block_size);
    span.unit = static_cast<int32_t>(plan_.unit);
    span.first_column = static_cast<int32_t>(first_column);
    span.num_columns = static_cast<int32_t>(last_column - first_column);
    span.split_columns = static_cast<int32_t>(split_columns);
    return span;
  }

  MassParams<T> mass_params(const LossSpan& span) const {
    MassParams<T> params;
    params.span = span;
    params.query = input_view<T>(call_.query);
    params.key = input_view<T>(call_.key);
    params.heads = static_cast<int32_t>(call_.heads());
    params.kv_heads = static_cast<int32_t>(call_.kv_heads());
    params.key_dim = static_cast<int32_t>(call_.key_dim());
    params.part_heads = static_cast<int32_t>(plan_.part_heads);
    while ((int64_t{1} << params.part_shift) < plan_.part_heads)
      ++params.part_shift;
    params.parts = static_cast<int32_t>(plan_.parts);
    params.scale = static_cast<float>(call_.scale * kLog2e);
    return params;
  }

  template <bool kMasses>
  void launch_masses(const MassParams<T>& params) const {
    if (plan_.kernel == MassKernel::kGeneral) {
      C10_CUDA_CHECK((launch_general_masses<T, kMasses>(params, stream_)));
    } else if constexpr (sizeof(T) == 2) {
      C10_CUDA_CHECK((launch_tensor_masses<T, kMasses>(params, stream_)));
    }
  }

  // lse of some batches.
  void attend(int64_t first_batch, int64_t num_batches, const Tensor& lse) const {
    const int64_t num_rows = num_batches * call_.rows() * call_.heads();
    const Tensor partials =
        device_scratch(plan_.splits * num_rows * static_cast<int64_t>(sizeof(float2)), call_.query);
    MassParams<T> params =
        mass_params(span_of(first_batch, num_batches, 0, plan_.columns, plan_.split_columns));
    params.partials = static_cast<float2*>(partials.mutable_data_ptr());
    launch_masses<false>(params);
    CombineParams combine;
    combine.partials = params.partials;
    combine.num_rows = num_rows;
    combine.splits = static_cast<int32_t>(plan_.splits);
    combine.lse = output<float>(lse) + first_batch * call_.rows() * call_.heads();
    C10_CUDA_CHECK(launch_combine_statistics(combine, stream_));
  }

  // f(span, held, range) for ranges of blocks of some batches, whose masses, scores and places are held meanwhile.
  template <typename F>
  void for_ranges(int64_t first_batch, int64_t num_batches, const Tensor& lse, const F& f) const {
    const int64_t units = plan_.units_of_block(call_.block_size), blocks = plan_.columns / units;
    const int64_t held_rows = num_batches * call_.rows();
    const int64_t most = std::min(plan_.columns, plan_.held_columns(call_.block_size));
    const Tensor masses = device_scratch(held_rows * all_parts() * most * 4, call_.query);
    const Tensor scores = device_scratch(held_rows * call_.index_heads() * most * 4, call_.query);
    const Tensor places = device_scratch(held_rows * call_.index_heads() * most * 4, call_.query);
    HeldColumns held;
    held.masses = static_cast<float*>(masses.mutable_data_ptr());
    held.scores = static_cast<const float*>(scores.const_data_ptr());
    held.places = static_cast<const int32_t*>(places.const_data_ptr());
    held.index_heads = static_cast<int32_t>(call_.index_heads());
    held.parts = static_cast<int32_t>(all_parts() / call_.index_heads());
    held.share = 1.0f / static_cast<float>(call_.heads() / call_.index_heads());
    for (int64_t first = 0; first < blocks; first += plan_.range_blocks) {
      const int64_t last = std::min(first + plan_.range_blocks, blocks);
      // Where documents do not begin at multiples of a block, the first tokens are of the block before.
      const int64_t before = call_.cu_seqlens.defined() && first > 0 ? 1 : 0;
      const Range range = {first, last, (first - before) * units, last * units};
      const LossSpan span =
          span_of(first_batch, num_batches, range.first_column, range.last_column, plan_.split_columns);
      MassParams<T> mass = mass_params(span);
      mass.lse = input<float>(lse);
      mass.masses = held.masses;
      launch_masses<true>(mass);
      ScoreParams<T> score;
      score.span = span;
      score.span.split_columns = static_cast<int32_t>(plan_.score_columns);
      score.query = input_view<T>(call_.index_query);
      score.key = input_view<T>(call_.index_key);
      score.heads = static_cast<int32_t>(call_.index_heads());
      score.d = static_cast<int32_t>(call_.index_dim());
      score.scores = static_cast<float*>(scores.mutable_data_ptr());
      score.places = static_cast<int32_t*>(places.mutable_data_ptr());
      C10_CUDA_CHECK(launch_index_scores(score, stream_));
      held.first_block = static_cast<int32_t>(first);
      held.is_first = first == 0;
      f(span, held, range);
    }
  }

  void store_query_gradient(const GradientParams<T>& of, const Tensor& of_query) const {
    of_query.zero_();
    QueryGradientParams<T> params;
    params.table = table();
    params.row_sums = of.row_sums;
    params.batch = static_cast<int32_t>(call_.batch());
    params.rows = static_cast<int32_t>(call_.rows());
    params.index_heads = static_cast<int32_t>(call_.index_heads());
    params.d = of.d;
    params.gradient = output_view<T>(of_query);
    C10_CUDA_CHECK(launch_query_gradient(params, stream_));
  }

  const Call& call_;
  const cudaStream_t stream_;
  const LossPlan plan_;
  Tensor table_, counted_, offsets_;
};

template <typename F>
void with_launches(const Call& call, const F& f) {
  const tree_attention::Tensor& query = call.query;
  TORCH_CHECK_VALUE(call.batch() * call.rows() < tree_attention::kIndexLimit, call.op,
                    ": positions must have less than 2^31 rows, got ", call.batch() * call.rows());
  const LaunchScope scope(query);
  dispatch_device_dtype(call.op, query.scalar_type(), FloatTypes{}, [&](auto tag) {
    Launches<typename decltype(tag)::type> launches(call, scope.stream());
    f(launches);
  });
}

}  // namespace

void forward_cuda(const Call& call, const Results& results) {
  with_launches(call, [&](auto& launches) { launches.forward(results); });
}

void backward_cuda(const Call& call, const Tensor& lse, const Tensor& index_lse, const Tensor& dloss,
                   const Gradients& gradients) {
  with_launches(call, [&](auto& launches) { launches.backward(lse, index_lse, dloss, gradients); });
}

}  // namespace htree::index_loss
