#include "ops/tree_attention/packed_options.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <iterator>
#include <limits>
#include <memory>
#include <sstream>

#include "host/registration.h"
#include "ops/tree/tree_checks.h"

namespace htree::tree_attention {
namespace {

// ---- packing

class Packer {
 public:
  void put(int64_t value) { packed.ints.push_back(value); }
  void put(bool value) { packed.ints.push_back(value); }
  void put(Importance value) { packed.ints.push_back(static_cast<int64_t>(value)); }
  void put(double value) { packed.floats.push_back(value); }
  void put(const std::vector<double>& values) {
    put(static_cast<int64_t>(values.size()));
    packed.floats.insert(packed.floats.end(), values.begin(), values.end());
  }
  template <typename T>
  void put(const std::optional<T>& value) {
    put(value.has_value());
    if (value.has_value()) put(*value);
  }

  PackedOptions packed;
};

class Unpacker {
 public:
  Unpacker(at::IntArrayRef ints, at::ArrayRef<double> floats) : ints_(ints), floats_(floats) {}

  void get(int64_t& value) {
    check(int_ < ints_.size());
    value = ints_[int_++];
  }
  void get(bool& value) { value = below(2) != 0; }
  void get(Importance& value) { value = static_cast<Importance>(below(kImportanceNames.size())); }
  void get(double& value) {
    check(float_ < floats_.size());
    value = floats_[float_++];
  }
  void get(std::vector<double>& values) {
    values.resize(below(floats_.size() - float_ + 1));
    for (double& value : values)
      get(value);
  }
  template <typename T>
  void get(std::optional<T>& value) {
    value.reset();
    if (below(2) != 0) get(value.emplace());
  }
  void finish() const { check(int_ == ints_.size() && float_ == floats_.size()); }

 private:
  // The next int, which is at least 0 and less than `end`.
  size_t below(size_t end) {
    int64_t value = 0;
    get(value);
    check(value >= 0 && static_cast<size_t>(value) < end);
    return static_cast<size_t>(value);
  }
  void check(bool holds) const {
    TORCH_CHECK_VALUE(holds,
                      "htree: option_ints and option_floats must be what TreeOptions.packed() gives, got ",
                      ints_, " and ", floats_);
  }

  at::IntArrayRef ints_;
  at::ArrayRef<double> floats_;
  size_t int_ = 0, float_ = 0;
};

// ---- by name

const char* type_name(int64_t) {
  return "int";
}
const char* type_name(bool) {
  return "bool";
}
const char* type_name(Importance) {
  return "str";
}
const char* type_name(double) {
  return "float";
}
const char* type_name(const std::vector<double>&) {
  return "float[]";
}
template <typename T>
std::string type_name(const std::optional<T>&) {
  return std::string(type_name(T())) + "?";
}

void print_default(std::ostream& out, int64_t value) {
  out << value;
}
void print_default(std::ostream& out, bool value) {
  out << (value ? "True" : "False");
}
void print_default(std::ostream& out, Importance value) {
  out << '"' << kImportanceNames[static_cast<size_t>(value)] << '"';
}
void print_default(std::ostream& out, double value) {
  out << std::showpoint << value;
}
template <typename T>
void print_default(std::ostream& out, const std::optional<T>& value) {
  if constexpr (std::is_same_v<T, std::vector<double>>) {
    TORCH_INTERNAL_ASSERT(!value.has_value());
  } else if (value.has_value()) {
    return print_default(out, *value);
  }
  out << "None";
}

std::string schema_of(int first, int last) {
  std::ostringstream schema;
  const TreeOptions defaults;
  int place = 0;
  for_each_option(defaults, [&](const char* name, const auto& value) {
    if (place >= first && place < last) {
      schema << (place > first ? ", " : "") << type_name(value) << ' ' << name << '=';
      print_default(schema, value);
    }
    ++place;
  });
  return schema.str();
}

template <typename T>
void read(const char* /*op*/, const c10::IValue& value, T& option) {
  option = value.to<T>();
}
void read(const char* op, const c10::IValue& value, Importance& option) {
  option = parse_importance(op, value.toStringRef());
}

// The kernel of an op by name.
class CallPacked : public c10::OperatorKernel {
 public:
  CallPacked(const char* packed, const char* function)
      : packed_op_(registered_name(packed)), function_(function) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                  torch::jit::Stack* stack) const {
    const std::vector<c10::Argument>& arguments = op.schema().arguments();
    TreeOptions options;
    torch::jit::Stack packed;
    const auto given = torch::jit::last(*stack, arguments.size());
    for (size_t i = 0; i < given.size(); ++i) {
      bool is_option = false;
      for_each_option(options, [&](const char* name, auto& option) {
        if (arguments[i].name() == name) {
          read(function_, given[i], option);
          is_option = true;
        }
      });
      if (!is_option) packed.push_back(given[i]);
    }
    torch::jit::drop(*stack, arguments.size());
    PackedOptions numbers = pack_options(options);
    torch::jit::push(packed, std::move(numbers.ints), std::move(numbers.floats));
    c10::Dispatcher::singleton().findSchemaOrThrow(packed_op_.c_str(), "").callBoxed(&packed);
    stack->insert(stack->end(), std::make_move_iterator(packed.begin()),
                  std::make_move_iterator(packed.end()));
  }

 private:
  const std::string packed_op_;
  const char* function_;
};

}  // namespace

PackedOptions pack_options(const TreeOptions& options) {
  Packer packer;
  for_each_option(options, [&](const char* /*name*/, const auto& value) { packer.put(value); });
  return std::move(packer.packed);
}

TreeOptions unpack_options(at::IntArrayRef ints, at::ArrayRef<double> floats) {
  TreeOptions options;
  Unpacker unpacker(ints, floats);
  for_each_option(options, [&](const char* /*name*/, auto& value) { unpacker.get(value); });
  unpacker.finish();
  return options;
}

std::string documented_schema() {
  return schema_of(0, kDocumentedOptions);
}

std::string later_schema() {
  return schema_of(kDocumentedOptions, std::numeric_limits<int>::max());
}

void register_by_name(torch::Library& library, const char* name, const char* packed, const char* function) {
  library.impl(name, torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd,
                                     torch::CppFunction::makeFromBoxedFunctor(
                                         std::make_unique<CallPacked>(packed, function))));
}

namespace {

// check_options() without a call, for options that are made before one. `function` is what messages call it.
void check_tree_options(std::string_view function, at::IntArrayRef ints, at::ArrayRef<double> floats) {
  const std::string name(function);
  check_options(name.c_str(), unpack_options(ints, floats));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  const std::string schema = std::string("_check_tree_options(str function, ") + kPackedSchema + ") -> ()";
  define_ops(library, {schema});
  OpKernels(library, DispatchKey::CompositeExplicitAutograd)
      .impl("_check_tree_options", TORCH_FN(check_tree_options));
}

}  // namespace htree::tree_attention
