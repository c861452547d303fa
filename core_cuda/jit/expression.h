// The C++ expression that names a kernel: a function template of a header and its template arguments. Expressions are
// compared as a few integers, and written as text only when a kernel is compiled. No CUDA and no torch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

namespace edgeless::jit {

struct KernelName {
  std::string header;      // the header that defines the kernel, relative to core_cuda
  std::string expression;  // the kernel with its namespace and template arguments
};

// All texts must live forever, as literals do. Names are relative to the namespace edgeless::cuda unless noted.

// A type, as it is written at global scope: "float", "edgeless::cuda::Segment".
struct Type {
  const char* text;
};

// An argument of a template: a number, a bool, a type, a value of an enumeration, or an instance of another template.
// An enumeration E needs a function `const char* type_text(E)` in its namespace, which returns its global name.
class Argument;

// A class template with its arguments.
struct Instance {
  const char* name;
  std::initializer_list<Argument> arguments;
};

class Argument {
 public:
  enum class Kind : uint64_t { number, flag, type, enumeration, instance };

  constexpr Argument(int value) : kind(Kind::number), number(value) {}
  constexpr Argument(bool value) : kind(Kind::flag), number(value) {}
  constexpr Argument(Type type) : kind(Kind::type), text(type.text) {}
  constexpr Argument(const Instance& of) : kind(Kind::instance), text(of.name), arguments(of.arguments) {}
  template <class E, std::enable_if_t<std::is_enum_v<E>, int> = 0>
  constexpr Argument(E value) : kind(Kind::enumeration), number(static_cast<int64_t>(value)), text(type_text(value)) {}

  Kind kind;
  int64_t number = 0;
  const char* text = nullptr;
  std::initializer_list<Argument> arguments = {};
};

class Expression {
 public:
  // function: the name of a kernel template or, without arguments, of a kernel that is no template.
  Expression(const char* header, const char* function, std::initializer_list<Argument> arguments = {})
      : header_(header), function_(function) {
    for (const Argument& argument : arguments) add(argument);
  }

  KernelName name() const;
  uint64_t hash() const;
  friend bool operator==(const Expression& a, const Expression& b) {
    return a.function_ == b.function_ && a.size_ == b.size_ &&
           std::equal(a.words_.begin(), a.words_.begin() + a.size_, b.words_.begin());
  }

 private:
  static constexpr int kMostWords = 24;

  void add(const Argument& argument);
  void push(uint64_t word);
  std::string text(int& at) const;

  const char *header_, *function_;
  std::array<uint64_t, kMostWords> words_;  // the first size_ are set
  int size_ = 0;
};

}  // namespace edgeless::jit
