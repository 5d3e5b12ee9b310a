// Schemas, Meta, Autograd and registrations of the compressed_kv family.
// docs/semantics/compressed_kv.md §4.4 to §4.6
#include "ops/compressed_kv/compressed_kv.h"

#include <torch/library.h>

#include "host/no_gradient.h"
#include "host/registration.h"

namespace htree::compressed_kv {
namespace {

at::Tensor with_unit_stride(const at::Tensor& x) {
  return x.size(-1) == 1 || x.stride(-1) == 1 ? x : x.contiguous();
}

at::Tensor weight_as_float(const OptionalTensor& weight) {
  return weight.has_value() ? weight->to(at::kFloat).contiguous() : at::Tensor();
}

// keys = (x.abs().float() * weight.unsqueeze(2)).nan_to_num(nan=above inf)
// kept = keys.argsort(-1, descending=True, stable=True)[..., :keep]      ties: the lower channel
// mask = zeros.scatter(-1, kept, 1);  pruned = where(mask, x, 0);  bitmap = packed mask
template <Prune* kPrune>
Outputs2 prune(const at::Tensor& x, int64_t keep, const OptionalTensor& weight) {
  const auto outputs = prepare_prune(x, keep, weight);
  if (x.numel() != 0) {
    kPrune(row_format(x.size(3), keep, 16), with_unit_stride(x), weight_as_float(weight),
           std::get<0>(outputs), std::get<1>(outputs));
  }
  return outputs;
}

// scale = (kept.abs().amax(-1) / qmax).half();  codes = (kept / scale.float()).round().clamp(-qmax, qmax)
template <Compress* kCompress>
Outputs3 compress(const at::Tensor& x, int64_t keep, int64_t bits, const OptionalTensor& weight) {
  const auto outputs = prepare_compress(x, keep, bits, weight);
  const auto& [bitmap, values, scales] = outputs;
  if (x.numel() != 0) {
    kCompress(with_unit_stride(x), weight_as_float(weight),
              Compressed{row_format(x.size(3), keep, bits), bitmap, values, scales});
  }
  return outputs;
}

// out = zeros.masked_scatter(mask, codes * scale)
template <Decompress* kDecompress>
at::Tensor decompress(const at::Tensor& bitmap, const at::Tensor& values, const at::Tensor& scales,
                      c10::SymInt head_dim, int64_t keep, int64_t bits, at::ScalarType dtype) {
  at::Tensor out = prepare_decompress(bitmap, values, scales, head_dim, keep, bits, dtype);
  if (out.numel() != 0) {
    kDecompress(Compressed{row_format(out.size(3), keep, bits), bitmap.contiguous(), values.contiguous(),
                           scales.contiguous()},
                out);
  }
  return out;
}

// k, v = decompress(...)[..., :comp_len, :] ++ window[..., :win_len, :]
// scores = (scale * q @ k.T).masked_fill(the tokens after that of the query, -inf)
// out = softmax(scores) @ v;  lse = logsumexp(scores)
template <Decode* kDecode>
Outputs2 decode(const at::Tensor& q, const at::Tensor& k_bitmap, const at::Tensor& k_values,
                const at::Tensor& k_scales, const at::Tensor& v_bitmap, const at::Tensor& v_values,
                const at::Tensor& v_scales, const at::Tensor& k_win, const at::Tensor& v_win,
                const OptionalTensor& comp_len, const OptionalTensor& win_len, std::optional<double> scale,
                const OptionalTensor& block_table, int64_t k_keep, int64_t v_keep, int64_t k_bits,
                int64_t v_bits, int64_t hadamard_group, int64_t split_size) {
  const DecodeArguments a{q,
                          {k_bitmap, k_values, k_scales, k_keep, k_bits},
                          {v_bitmap, v_values, v_scales, v_keep, v_bits},
                          k_win,
                          v_win,
                          comp_len,
                          win_len,
                          scale,
                          block_table,
                          hadamard_group,
                          split_size};
  const auto outputs = prepare_decode(a);
  const auto& [out, lse] = outputs;
  if constexpr (kDecode == nullptr) {
    return outputs;
  } else {
    if (lse.numel() == 0) return outputs;
    const auto contiguous = [](const OptionalTensor& t) {
      return t.has_value() ? OptionalTensor(t->contiguous()) : t;
    };
    const DecodeProblem problem = decode_problem_of(a);
    kDecode(problem,
            DecodeTensors{q.reshape({problem.batch, problem.num_heads, problem.key_dim}).contiguous(),
                          {row_format(problem.key_dim, k_keep, k_bits), k_bitmap.contiguous(),
                           k_values.contiguous(), k_scales.contiguous()},
                          {row_format(problem.value_dim, v_keep, v_bits), v_bitmap.contiguous(),
                           v_values.contiguous(), v_scales.contiguous()},
                          k_win.contiguous(),
                          v_win.contiguous(),
                          contiguous(comp_len),
                          contiguous(win_len),
                          contiguous(block_table)},
            out, lse);
    return outputs;
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(
      library,
      {
          "kv_prune(Tensor x, int keep, Tensor? weight=None) -> (Tensor pruned, Tensor bitmap)",
          "kv_compress(Tensor x, int keep, int bits=8, Tensor? weight=None) -> (Tensor bitmap, Tensor "
          "values, "
          "Tensor scales)",
          // 5 is torch.float16, for which the schema language has no name.
          "kv_decompress(Tensor bitmap, Tensor values, Tensor scales, SymInt D, int keep, int bits, "
          "ScalarType dtype=5) -> Tensor",
          "kv_decode_attention(Tensor q, Tensor k_bitmap, Tensor k_values, Tensor k_scales, Tensor v_bitmap, "
          "Tensor v_values, Tensor v_scales, Tensor k_win, Tensor v_win, Tensor? comp_len=None, "
          "Tensor? win_len=None, float? scale=None, Tensor? block_table=None, *, int k_keep, int v_keep, "
          "int k_bits=8, int v_bits=8, int hadamard_group=0, int split_size=0) -> (Tensor out, Tensor lse)",
      });
  const OpKernels cpu(library, DispatchKey::CPU);
  cpu.impl("kv_prune", TORCH_FN(prune<prune_cpu>));
  cpu.impl("kv_compress", TORCH_FN(compress<compress_cpu>));
  cpu.impl("kv_decompress", TORCH_FN(decompress<decompress_cpu>));
  cpu.impl("kv_decode_attention", TORCH_FN(decode<decode_cpu>));
#if defined(HTREE_WITH_CUDA)
  const OpKernels cuda(library, DispatchKey::CUDA);
  cuda.impl("kv_prune", TORCH_FN(prune<prune_cuda>));
  cuda.impl("kv_compress", TORCH_FN(compress<compress_cuda>));
  cuda.impl("kv_decompress", TORCH_FN(decompress<decompress_cuda>));
  cuda.impl("kv_decode_attention", TORCH_FN(decode<decode_cuda>));
#endif
  const OpKernels meta(library, DispatchKey::Meta);
  meta.impl("kv_prune", TORCH_FN(prepare_prune));
  meta.impl("kv_compress", TORCH_FN(prepare_compress));
  meta.impl("kv_decompress", TORCH_FN(prepare_decompress));
  meta.impl("kv_decode_attention", TORCH_FN(decode<nullptr>));
  register_no_gradient(library, {"kv_prune", "kv_compress", "kv_decompress", "kv_decode_attention"});
}

}  // namespace htree::compressed_kv
