#include "expression.h"

#include <stdexcept>

namespace edgeless::jit {
namespace {

// A word holds a value and, in its lowest bits, the kind of the argument. The value of a type, an enumeration or an
// instance is the address of its name; the words of an enumerator's number or of an instance's arguments follow.
constexpr int kKindBits = 3;
constexpr uint64_t kEnd = (uint64_t{1} << kKindBits) - 1;  // the word after the arguments of an instance

std::string from_global(const char* name) {
  const std::string text = name;
  return text.rfind("edgeless::", 0) == 0 ? text : "edgeless::cuda::" + text;
}

}  // namespace

void Expression::push(uint64_t word) {
  if (size_ == kMostWords) throw std::logic_error(std::string("edgeless: too many template arguments: ") + function_);
  words_[size_++] = word;
}

void Expression::add(const Argument& argument) {
  using Kind = Argument::Kind;
  const auto kind = static_cast<uint64_t>(argument.kind);
  const bool named =
      argument.kind == Kind::type || argument.kind == Kind::enumeration || argument.kind == Kind::instance;
  const uint64_t value = named ? reinterpret_cast<uintptr_t>(argument.text) : static_cast<uint64_t>(argument.number);
  push(value << kKindBits | kind);
  if (argument.kind == Kind::enumeration) push(static_cast<uint64_t>(argument.number));
  if (argument.kind != Kind::instance) return;
  for (const Argument& inner : argument.arguments) add(inner);
  push(kEnd);
}

std::string Expression::text(int& at) const {
  using Kind = Argument::Kind;
  const uint64_t word = words_[at++];
  const auto* const name = reinterpret_cast<const char*>(static_cast<uintptr_t>(word >> kKindBits));
  switch (static_cast<Kind>(word & kEnd)) {
    case Kind::number: return std::to_string(static_cast<int64_t>(word) >> kKindBits);
    case Kind::flag: return word >> kKindBits ? "true" : "false";
    case Kind::type: return name;
    case Kind::enumeration: return "(" + std::string(name) + ")" + std::to_string(static_cast<int64_t>(words_[at++]));
    case Kind::instance: break;
  }
  std::string inner;
  while (words_[at] != kEnd) inner += (inner.empty() ? "" : ", ") + text(at);
  ++at;
  return from_global(name) + "<" + inner + ">";
}

KernelName Expression::name() const {
  std::string arguments;
  for (int at = 0; at < size_;) arguments += (arguments.empty() ? "" : ", ") + text(at);
  return {header_, from_global(function_) + (size_ ? "<" + arguments + ">" : "")};
}

uint64_t Expression::hash() const {
  uint64_t hash = reinterpret_cast<uintptr_t>(function_);
  for (int i = 0; i < size_; ++i) hash = (hash ^ words_[i]) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
  return hash;
}

}  // namespace edgeless::jit
