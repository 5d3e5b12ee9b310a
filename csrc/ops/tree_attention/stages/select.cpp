// Schemas, Meta, Autograd and registrations of the selection ops and of top_parents.
// docs/semantics/tree_attention.md §1.3, §1.6
#include "ops/tree_attention/stages/select.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/where.h>

#include "host/autograd.h"
#include "host/no_gradient.h"
#include "host/op_handle.h"
#include "host/registration.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {
namespace {

// ---- factory

// leader = t0 + s * torch.arange(ceil(T / s)); m = leader // r**num_layers + 1
// torch.where(torch.arange(top_k) < m[:, None], torch.arange(top_k), -1)  # repeated over B and heads
Tensor top_parents(SymInt batch, SymInt queries, SymInt heads, int64_t top_k, int64_t num_layers,
                   int64_t compression_rate, SymInt t0, int64_t selection_stride,
                   std::optional<at::Device> device) {
  check_top_parents(batch, queries, heads, top_k, num_layers, compression_rate, t0, selection_stride);
  const auto options = at::TensorOptions().dtype(at::kLong).device(device.value_or(at::kCPU));
  const SymInt rows = list_rows(queries, selection_stride);
  const Tensor leader = at::arange(rows, options).mul(selection_stride).add(t0);
  const Tensor count = leader.div(node_span(compression_rate, num_layers), "floor").add(1);
  const Tensor slot = at::arange(top_k, options);
  const Tensor lists = at::where(slot.lt(count.unsqueeze(1)), slot, -1).to(at::kInt);
  // contiguous() alone would not copy where B and heads are 1, and the result must be fresh.
  return lists.view_symint({1, rows, 1, top_k})
      .expand_symint({batch, rows, heads, top_k})
      .clone(at::MemoryFormat::Contiguous);
}

// ---- CPU and CUDA

// rest = scores[..., : n - 1, :]  # the rightmost candidate is excluded
// imp = (rest - rest.logsumexp(-2, keepdim=True)).exp().sum(-1)  # "lse_causal"
// topk_positions = [n - 1, then torch.argsort(-imp, stable=True)][:top_k], padded with -1
// open_next: the first ceil(top_k / 2) of these, then what is behind them, then the others
template <SelectTopk* kKernel>
Tensor select_topk(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                   std::string_view importance, bool open_next) {
  constexpr const char* kOp = "select_topk";
  const SelectionOptions selection = {parse_importance(kOp, importance), open_next};
  Tensor topk_positions = prepare_positions(kOp, scores, num_candidates, top_k);
  if constexpr (kKernel != nullptr) {
    if (topk_positions.numel() > 0) {
      kKernel(unit_last(scores), unit_last(num_candidates), top_k, selection, topk_positions);
    }
  }
  return topk_positions;
}

// for b, t, h: scores[b, t, h, topk_positions[b, t, h][topk_positions[b, t, h] >= 0]] = -inf
template <MaskTopkScores* kKernel>
void mask_topk_scores(const Tensor& scores, const Tensor& topk_positions) {
  prepare_mask_topk_scores(scores, topk_positions);
  if constexpr (kKernel != nullptr) {
    if (scores.numel() == 0 || topk_positions.numel() == 0) return;
    const Tensor target = unit_last(scores);
    kKernel(target, unit_last(topk_positions));
    if (!target.is_same(scores)) scores.copy_(target);
  }
}

// node = parents.gather(-1, topk_positions // r) * r + topk_positions % r
// next_parents = node sorted ascending, with -1 where topk_positions is -1, those last
template <ComputeNextParents* kKernel>
Tensor compute_next_parents(const Tensor& parents, const Tensor& topk_positions, int64_t compression_rate) {
  Tensor next_parents = prepare_compute_next_parents(parents, topk_positions, compression_rate);
  if constexpr (kKernel != nullptr) {
    if (next_parents.numel() > 0) {
      kKernel(unit_last(parents), unit_last(topk_positions), compression_rate, next_parents);
    }
  }
  return next_parents;
}

// ---- IO-only variants

// a = min(top_k, n)
// hash[j] = LCG(j + 7 * t + 13 * h_kv + 31 * b), LCG(x) = (x * 1103515245 + 12345) & 0x7fffffff
// "lcg": hash[j] % n
// "stratified": first[j] + hash[j] % (first[j + 1] - first[j]) with first[j] = j * n // a
// Position a - 1 is n - 1, positions from a on are -1; at the bottom all are -1. `fold_mask` is the zero that
// no compiler sees: any other value adds bits of the scores to the positions.
template <IoSelectTopk* kKernel>
Tensor io_select_topk(const Tensor& scores, const Tensor& num_candidates, int64_t top_k, int64_t layer,
                      std::string_view select, SymInt t0, int64_t fold_mask) {
  Tensor topk_positions = prepare_io_select_topk(scores, num_candidates, top_k, layer, select, t0);
  if constexpr (kKernel != nullptr) {
    if (topk_positions.numel() > 0) {
      const IoPositions io = {t0.guard_int(__FILE__, __LINE__), layer == 0,
                              parse_io_select("io_select_topk", select), static_cast<uint32_t>(fold_mask)};
      kKernel(unit_last(scores), unit_last(num_candidates), top_k, io, topk_positions);
    }
  }
  return topk_positions;
}

// topk_positions as they are or, with map_positions, what compute_next_parents gives
template <ComputeNextParents* kCopy, ComputeNextParents* kMap>
Tensor io_compute_next_parents(const Tensor& parents, const Tensor& topk_positions, int64_t compression_rate,
                               bool map_positions) {
  Tensor next_parents =
      prepare_compute_next_parents(parents, topk_positions, compression_rate, "io_compute_next_parents");
  if constexpr (kCopy != nullptr) {
    if (next_parents.numel() > 0) {
      (map_positions ? kMap : kCopy)(unit_last(parents), unit_last(topk_positions), compression_rate,
                                     next_parents);
    }
  }
  return next_parents;
}

template <SelectTopk* kSelect, MaskTopkScores* kMask, ComputeNextParents* kNext, IoSelectTopk* kIoSelect,
          ComputeNextParents* kIoNext>
void register_device(const OpKernels& kernels) {
  kernels.impl("select_topk", TORCH_FN(select_topk<kSelect>));
  kernels.impl("mask_topk_scores_", TORCH_FN(mask_topk_scores<kMask>));
  kernels.impl("compute_next_parents", TORCH_FN(compute_next_parents<kNext>));
  kernels.impl("io_select_topk", TORCH_FN(io_select_topk<kIoSelect>));
  kernels.impl("io_compute_next_parents", TORCH_FN((io_compute_next_parents<kIoNext, kNext>)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(
      library,
      {
          "top_parents(SymInt B, SymInt T, SymInt heads, int top_k, int num_layers, int compression_rate=16, "
          "SymInt t0=0, int selection_stride=1, *, Device? device=None) -> Tensor",
          "select_topk(Tensor scores, Tensor num_candidates, int top_k, str importance=\"lse_causal\", "
          "bool open_next=False) -> Tensor topk_positions",
          "mask_topk_scores_(Tensor(a!) scores, Tensor topk_positions) -> ()",
          "compute_next_parents(Tensor parents, Tensor topk_positions, int compression_rate=16) -> Tensor",
          "io_select_topk(Tensor scores, Tensor num_candidates, int top_k, int layer=1, str select=\"lcg\", "
          "SymInt t0=0, int fold_mask=0) -> Tensor",
          "io_compute_next_parents(Tensor parents, Tensor topk_positions, int compression_rate=16, "
          "bool map_positions=False) -> Tensor",
      });
  OpKernels(library, DispatchKey::CompositeExplicitAutograd).impl("top_parents", TORCH_FN(top_parents));
  register_device<select_topk_cpu, mask_topk_scores_cpu, compute_next_parents_cpu, io_select_topk_cpu,
                  io_compute_next_parents_cpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_device<select_topk_cuda, mask_topk_scores_cuda, compute_next_parents_cuda, io_select_topk_cuda,
                  io_compute_next_parents_cuda>({library, DispatchKey::CUDA});
#endif
  register_device<nullptr, nullptr, nullptr, nullptr, nullptr>({library, DispatchKey::Meta});
  register_no_gradient(library,
                       {"select_topk", "compute_next_parents", "io_select_topk", "io_compute_next_parents"});
}

}  // namespace htree::tree_attention
