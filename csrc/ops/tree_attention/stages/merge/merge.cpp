// Schemas, Meta, Autograd and registrations of the state ops. docs/semantics/tree_attention.md §1.7.
#include "ops/tree_attention/stages/merge/merge.h"

#include <array>

#include "host/autograd.h"
#include "host/op_handle.h"
#include "host/registration.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {
namespace {

using StateAndIndices = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void call_merge_to_global(const Tensor& gmax, const Tensor& gsum, const Tensor& gout, const Tensor& lmax,
                          const Tensor& lsum, const Tensor& lout) {
  static const auto op = op_handle<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                        const Tensor&, const Tensor&)>("htree::merge_to_global_");
  op.call(gmax, gsum, gout, lmax, lsum, lout);
}

// ---- CPU and CUDA

// m = torch.maximum(gmax, lmax)
// sg, sl = (torch.where(s > 0, (x - m).exp(), 0) for x, s in ((gmax, gsum), (lmax, lsum)))      empty states
// count 0 gout, gsum, gmax = gout * sg[..., None] + lout * sl[..., None], gsum * sg + lsum * sl, m
template <MergeToGlobal* kKernel>
void merge_to_global(const Tensor& gmax, const Tensor& gsum, const Tensor& gout, const Tensor& lmax,
                     const Tensor& lsum, const Tensor& lout) {
  prepare_merge_to_global(gmax, gsum, gout, lmax, lsum, lout);
  const std::array<Tensor, 3> written = {gmax, gsum, gout};
  if (gout.numel() == 0) {
    return;
  }
  std::array<Tensor, 3> target;
  for (size_t i = 0; i < written.size(); ++i) {
    target[i] = unit_last(written[i]);
  }
  kKernel(target[0], target[1], target[2], unit_last(lmax), unit_last(lsum), unit_last(lout));
  for (size_t i = 0; i < written.size(); ++i) {
    if (!target[i].is_same(written[i])) {
      written[i].copy_(target[i]);
    }
  }
}

// tmax = topk_scores.amax(-1); w = (topk_scores - tmax[..., None]).exp(); f = (tmax - lmax).exp()
// lsum - w.sum(-1) * f, lout - (w[..., None] * layer_v[b, topk_indices, h // G]).sum(-2) * f[..., None]
// selected_indices = topk_indices sorted ascending, -1 last
template <SubtractTopk* kKernel>
StateAndIndices subtract_topk(const Tensor& layer_v, const Tensor& topk_indices, const Tensor& topk_scores,
                              const Tensor& lmax, const Tensor& lsum, const Tensor& lout) {
  Tensor selected = prepare_subtract_topk(layer_v, topk_indices, topk_scores, lmax, lsum, lout);
  StateAndIndices result = {lmax.clone(at::MemoryFormat::Contiguous),
                            lsum.clone(at::MemoryFormat::Contiguous),
                            lout.clone(at::MemoryFormat::Contiguous), selected};
  if (selected.numel() > 0) {
    kKernel(unit_last(layer_v), unit_last(topk_indices), unit_last(topk_scores), std::get<0>(result),
            std::get<1>(result), std::get<2>(result), selected);
  }
  return result;
}

// (gout / gsum[..., None]).to(dtype)
template <FinalNormalize* kKernel>
Tensor final_normalize(const Tensor& gout, const Tensor& gsum, std::optional<at::ScalarType> dtype) {
  Tensor out = prepare_final_normalize(gout, gsum, dtype);
  if (out.numel() > 0) {
    kKernel(unit_last(gout), unit_last(gsum), out);
  }
  return out;
}

StateAndIndices subtract_topk_meta(const Tensor& layer_v, const Tensor& topk_indices,
                                   const Tensor& topk_scores, const Tensor& lmax, const Tensor& lsum,
                                   const Tensor& lout) {
  Tensor selected = prepare_subtract_topk(layer_v, topk_indices, topk_scores, lmax, lsum, lout);
  return {new_tensor(lmax.sym_sizes(), lmax.scalar_type(), lmax),
          new_tensor(lsum.sym_sizes(), lsum.scalar_type(), lsum),
          new_tensor(lout.sym_sizes(), lout.scalar_type(), lout), selected};
}

// ---- Autograd of the mutating op

void merge_to_global_autograd(const Tensor& gmax, const Tensor& gsum, const Tensor& gout, const Tensor& lmax,
                              const Tensor& lsum, const Tensor& lout) {
  mutate_below_autograd("merge_to_global_", {gmax, gsum, gout, lmax, lsum, lout},
                        [&] { call_merge_to_global(gmax, gsum, gout, lmax, lsum, lout); });
}

void merge_to_global_adinplace(const Tensor& gmax, const Tensor& gsum, const Tensor& gout, const Tensor& lmax,
                               const Tensor& lsum, const Tensor& lout) {
  mutate_and_bump({gmax, gsum, gout}, [&] { call_merge_to_global(gmax, gsum, gout, lmax, lsum, lout); });
}

template <MergeToGlobal* kMerge, SubtractTopk* kSubtract, FinalNormalize* kNormalize>
void register_device(torch::Library& library) {
  library.impl("merge_to_global_", TORCH_FN(merge_to_global<kMerge>));
  library.impl("subtract_topk", TORCH_FN(subtract_topk<kSubtract>));
  library.impl("final_normalize", TORCH_FN(final_normalize<kNormalize>));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(htree, library) {
  define_ops(library, {
                          "merge_to_global_(Tensor(a!) gmax, Tensor(b!) gsum, Tensor(c!) gout, Tensor lmax, "
                          "Tensor lsum, Tensor lout) "
                          "-> ()",
                          "subtract_topk(Tensor layer_v, Tensor topk_indices, Tensor topk_scores, Tensor "
                          "lmax, Tensor lsum, Tensor lout) "
                          "-> (Tensor lmax, Tensor lsum, Tensor lout, Tensor selected_indices)",
                          "final_normalize(Tensor gout, Tensor gsum, ScalarType? dtype=None) -> Tensor",
                      });
}

TORCH_LIBRARY_IMPL(htree, CPU, library) {
  register_device<merge_to_global_cpu, subtract_topk_cpu, final_normalize_cpu>(library);
}

#if defined(HTREE_WITH_CUDA)
TORCH_LIBRARY_IMPL(htree, CUDA, library) {
  register_device<merge_to_global_cuda, subtract_topk_cuda, final_normalize_cuda>(library);
}
#endif

TORCH_LIBRARY_IMPL(htree, Meta, library) {
  library.impl("merge_to_global_", TORCH_FN(prepare_merge_to_global));
  library.impl("subtract_topk", TORCH_FN(subtract_topk_meta));
  library.impl("final_normalize", TORCH_FN(prepare_final_normalize));
}

TORCH_LIBRARY_IMPL(htree, Autograd, library) {
  register_no_gradient(library, {"subtract_topk", "final_normalize"});
  library.impl("merge_to_global_", TORCH_FN(merge_to_global_autograd));
}

TORCH_LIBRARY_IMPL(htree, ADInplaceOrView, library) {
  library.impl("merge_to_global_", TORCH_FN(merge_to_global_adinplace));
}

}  // namespace htree::tree_attention
