#include "host/overlap.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace htree {
namespace {

// A place of a tensor is a sum of stride * x over its dims, in bytes, with 0 <= x <= last.
struct Term {
  int64_t stride;
  int64_t last;
};

bool is_symbolic(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

int64_t element_size_of(const at::Tensor& t) {
  return static_cast<int64_t>(t.element_size());
}

// The dims of more than one element.
std::vector<Term> terms_of(const at::Tensor& t) {
  std::vector<Term> terms;
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    if (t.size(dim) > 1) {
      terms.push_back({t.stride(dim) * element_size_of(t), t.size(dim) - 1});
    }
  }
  return terms;
}

int64_t reach_of(const std::vector<Term>& terms) {
  int64_t bytes = 0;
  for (const Term& term : terms) {
    bytes += term.stride * term.last;
  }
  return bytes;
}

// Bytes from the first element of a to that of b; none where they cannot be compared.
std::optional<int64_t> distance_between(const at::Tensor& a, const at::Tensor& b) {
  if (is_symbolic(a) || is_symbolic(b) || a.device() != b.device()) {
    return std::nullopt;
  }
  if (!a.is_meta()) {
    return static_cast<int64_t>(reinterpret_cast<intptr_t>(b.const_data_ptr()) -
                                reinterpret_cast<intptr_t>(a.const_data_ptr()));
  }
  if (!a.is_alias_of(b)) {
    return std::nullopt;
  }
  return b.storage_offset() * element_size_of(b) - a.storage_offset() * element_size_of(a);
}

// Whether each stride, from the smallest on, steps over everything that those before it reach.
bool is_nested(const at::Tensor& t) {
  std::vector<Term> terms = terms_of(t);
  std::sort(terms.begin(), terms.end(), [](Term a, Term b) { return a.stride < b.stride; });
  int64_t reach = element_size_of(t);
  for (const Term& term : terms) {
    if (term.stride < reach) {
      return false;
    }
    reach += term.stride * term.last;
  }
  return true;
}

// Whether the terms from `first` on, whose strides descend, have the sum `target`. `reach` is the largest sum of them.
// Nested strides leave few values to each term; a search of more than kMaxSteps answers true.
bool has_sum(const std::vector<Term>& terms, size_t first, int64_t target, int64_t reach, int& steps) {
  constexpr int kMaxSteps = 1 << 16;
  if (++steps > kMaxSteps) {
    return true;
  }
  if (first == terms.size() || target < 0 || target > reach) {
    return target == 0;
  }
  const auto [stride, last] = terms[first];
  const int64_t rest = reach - stride * last;  // the largest sum of the terms behind this one
  for (int64_t x = std::min(last, target / stride); x >= 0 && target - stride * x <= rest; --x) {
    if (has_sum(terms, first + 1, target - stride * x, rest, steps)) {
      return true;
    }
  }
  return false;
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  const std::optional<int64_t> distance = distance_between(a, b);
  if (!distance.has_value() || a.numel() == 0 || b.numel() == 0) {
    return false;
  }
  // Byte u of an element of a meets byte v of one of b where place of a + u - (place of b + v) is the distance. Whatever is
  // taken away counts backwards from its end instead.
  std::vector<Term> terms = terms_of(a);
  std::vector<Term> backwards = terms_of(b);
  terms.push_back({1, element_size_of(a) - 1});
  backwards.push_back({1, element_size_of(b) - 1});
  const int64_t target = *distance + reach_of(backwards);
  terms.insert(terms.end(), backwards.begin(), backwards.end());
  std::sort(terms.begin(), terms.end(), [](Term x, Term y) { return x.stride > y.stride; });
  std::vector<Term> merged;  // one term for each stride
  for (const Term& term : terms) {
    if (!merged.empty() && merged.back().stride == term.stride) {
      merged.back().last += term.last;
    } else if (term.stride > 0) {
      merged.push_back(term);
    }
  }
  int steps = 0;
  return has_sum(merged, 0, target, reach_of(merged), steps);
}

}  // namespace

bool is_same_view(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_same(b)) {
    return true;
  }
  if (distance_between(a, b) != 0 || a.dim() != b.dim()) {
    return false;
  }
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) != b.size(dim) || (a.size(dim) > 1 && a.stride(dim) != b.stride(dim))) {
      return false;
    }
  }
  return true;
}

void check_writable(const char* op, const char* name, const at::Tensor& written) {
  TORCH_CHECK(is_symbolic(written) || written.numel() == 0 || is_nested(written), op, ": elements of ", name,
              " must not share memory, and each of its strides must step over all that smaller ones reach, "
              "got shape ",
              written.sizes(), " and strides ", written.strides());
}

void check_disjoint(const char* op, const char* name, const at::Tensor& written, const char* other_name,
                    const at::Tensor& other) {
  TORCH_CHECK(!share_memory(written, other), op, ": ", name, " must not share memory with ", other_name,
              ", got shapes ", written.sizes(), " and ", other.sizes(), ", strides ", written.strides(),
              " and ", other.strides());
}

}  // namespace htree
