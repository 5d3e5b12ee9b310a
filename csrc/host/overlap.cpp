#include "host/overlap.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace htree {
namespace {

// Two places have the same address where sum_i stride_i * x_i = target with 0 <= x_i <= last_i. This bounded
// Diophantine equation is NP-complete in general and almost free for the nested strides of real tensors.
struct Term {
  int64_t stride;
  int64_t last;
};

class Equation {
 public:
  explicit Equation(std::vector<Term> terms) : terms_(std::move(terms)) {
    std::sort(terms_.begin(), terms_.end(), [](Term a, Term b) { return a.stride > b.stride; });
    reach_.assign(terms_.size() + 1, 0);
    divisor_.assign(terms_.size() + 1, 0);
    for (size_t i = terms_.size(); i-- > 0;) {
      reach_[i] = reach_[i + 1] + terms_[i].stride * terms_[i].last;
      divisor_[i] = std::gcd(divisor_[i + 1], terms_[i].stride);
    }
  }

  // Also true where the search takes more than kMaxSteps.
  bool solvable(int64_t target) {
    steps_ = 0;
    return solvable_from(0, target);
  }

 private:
  static constexpr int kMaxSteps = 1 << 16;

  bool solvable_from(size_t first, int64_t target) {
    if (target == 0 || ++steps_ > kMaxSteps) {
      return true;
    }
    if (target < 0 || target > reach_[first] || target % divisor_[first] != 0) {
      return false;
    }
    const auto [stride, last] = terms_[first];
    if (first + 1 == terms_.size()) {
      return true;  // within reach, and a multiple
    }
    const int64_t rest = std::max<int64_t>(target - reach_[first + 1], 0);
    const int64_t least = (rest + stride - 1) / stride;
    for (int64_t x = std::min(last, target / stride); x >= least; --x) {
      if (solvable_from(first + 1, target - stride * x)) {
        return true;
      }
    }
    return false;
  }

  std::vector<Term> terms_;
  std::vector<int64_t> reach_;    // of terms i and later together
  std::vector<int64_t> divisor_;  // of the strides of terms i and later
  int steps_ = 0;
};

bool is_symbolic(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

int64_t element_size_of(const at::Tensor& t) {
  return static_cast<int64_t>(t.element_size());
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

// Bytes from the first byte of t to the end of its last.
int64_t extent_of(const at::Tensor& t) {
  int64_t bytes = element_size_of(t);
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    bytes += (t.size(dim) - 1) * t.stride(dim) * element_size_of(t);
  }
  return bytes;
}

// Dims of more than one element, strides in bytes.
std::vector<Term> terms_of(const at::Tensor& t) {
  std::vector<Term> terms;
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    if (t.size(dim) > 1) {
      terms.push_back({t.stride(dim) * element_size_of(t), t.size(dim) - 1});
    }
  }
  return terms;
}

// Each dim, from the smallest stride on, steps over everything that the dims before it reach.
bool is_nested(std::vector<Term> terms, int64_t element_size) {
  std::sort(terms.begin(), terms.end(), [](Term a, Term b) { return a.stride < b.stride; });
  int64_t reach = element_size;
  for (const Term& term : terms) {
    if (term.stride < reach) {
      return false;
    }
    reach += term.stride * term.last;
  }
  return true;
}

}  // namespace

bool overlaps_itself(const at::Tensor& t) {
  if (is_symbolic(t) || t.numel() == 0 || t.is_non_overlapping_and_dense()) {
    return false;
  }
  const std::vector<Term> terms = terms_of(t);
  if (is_nested(terms, element_size_of(t))) {
    return false;
  }
  if (std::any_of(terms.begin(), terms.end(), [](Term term) { return term.stride == 0; })) {
    return true;
  }
  // Two different places differ by d_i in dim i, with d > 0 in at least one dim, say the first that differs.
  // Put d_i = x_i + 1 in that dim and d_j = x_j - last_j in all others, and this is the same equation.
  for (size_t i = 0; i < terms.size(); ++i) {
    std::vector<Term> shifted = terms;
    int64_t target = -terms[i].stride;
    for (size_t j = 0; j < terms.size(); ++j) {
      if (j == i) {
        shifted[j].last = terms[j].last - 1;
      } else {
        shifted[j].last = 2 * terms[j].last;
        target += terms[j].stride * terms[j].last;
      }
    }
    if (Equation(std::move(shifted)).solvable(target)) {
      return true;
    }
  }
  return false;
}

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

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  const std::optional<int64_t> distance = distance_between(a, b);
  if (!distance.has_value() || a.numel() == 0 || b.numel() == 0 || *distance >= extent_of(a) ||
      -*distance >= extent_of(b)) {
    return false;
  }
  // The place of a minus the place of b equals the distance; the dims of b count backwards from their ends.
  // Elements are wider than a byte, so byte u of a's element may meet byte v of b's.
  std::vector<Term> terms = terms_of(a);
  int64_t target = *distance;
  for (const Term& term : terms_of(b)) {
    terms.push_back(term);
    target += term.stride * term.last;
  }
  terms.erase(std::remove_if(terms.begin(), terms.end(), [](Term term) { return term.stride == 0; }),
              terms.end());
  terms.push_back({1, element_size_of(a) - 1});
  terms.push_back({1, element_size_of(b) - 1});
  target += element_size_of(b) - 1;
  return target >= 0 && Equation(std::move(terms)).solvable(target);
}

void check_writable(const char* op, const char* name, const at::Tensor& written) {
  TORCH_CHECK(!overlaps_itself(written), op, ": elements of ", name,
              " must not share memory, those of shape ", written.sizes(), " and strides ", written.strides(),
              " do");
}

void check_disjoint(const char* op, const char* name, const at::Tensor& written, const char* other_name,
                    const at::Tensor& other) {
  TORCH_CHECK(!share_memory(written, other), op, ": ", name, " must not share memory with ", other_name,
              ", got shapes ", written.sizes(), " and ", other.sizes(), ", strides ", written.strides(),
              " and ", other.strides());
}

}  // namespace htree
