// From a run-time value to a template argument, without macros. A value that is not in the list is an error
// that names the compiled ones: a dispatch that falls through would leave the output unwritten.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <string>
#include <type_traits>
#include <utility>

namespace htree {

template <typename... Ts>
struct TypeList {};

template <typename T>
struct Type {
  using type = T;
};

using FloatTypes = TypeList<float, c10::Half, c10::BFloat16>;
using AllFloatTypes = TypeList<float, c10::Half, c10::BFloat16, double>;

// Calls f(Type<T>{}), T being the type of the list that `dtype` names.
template <typename F, typename... Ts>
void dispatch_dtype(const char* op, at::ScalarType dtype, TypeList<Ts...>, F&& f) {
  const bool found =
      ((dtype == c10::CppTypeToScalarType<Ts>::value ? (std::forward<F>(f)(Type<Ts>{}), true) : false) ||
       ...);
  if (!found) {
    std::string compiled;
    ((compiled += std::string(" ") + c10::toString(c10::CppTypeToScalarType<Ts>::value)), ...);
    TORCH_CHECK_TYPE(false, op, ": dtype = ", dtype, " has no kernel; compiled:", compiled);
  }
}

// Calls f(std::integral_constant<int, N>{}), N being the number of the list that equals `value`. `name` is
// for the error.
template <int... Ns, typename F>
void dispatch_int(const char* op, const char* name, int64_t value, F&& f) {
  const bool found =
      ((value == Ns ? (std::forward<F>(f)(std::integral_constant<int, Ns>{}), true) : false) || ...);
  if (!found) {
    std::string compiled;
    ((compiled += " " + std::to_string(Ns)), ...);
    TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": ", name, " = ", value, " has no kernel; compiled:", compiled);
  }
}

}  // namespace htree
