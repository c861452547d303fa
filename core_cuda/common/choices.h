// A user's choices for `with` blocks (shared/choices/scoped.py). A choice belongs to the calling thread; threads of
// autograd inherit it from the thread that called backward(), as they inherit torch's own settings.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace edgeless {

// A choice among several names. The first name is the default, which holds outside of all blocks.
class Choice {
 public:
  // One `with` block, open from begin() to end().
  struct Block {
    explicit Block(int chosen) : chosen(chosen) {}
    const int chosen;
    std::atomic<bool> open{true};
  };

  Choice(std::string key, std::vector<std::string> names) : key_(std::move(key)), names_(std::move(names)) {}

  const std::vector<std::string>& names() const { return names_; }
  int chosen() const;  // index into names() of the choice of the calling thread's most recent open block, else 0

  // Blocks of several tasks or generators of one thread may end in any order, and in another thread than the one that
  // began them. end() closes the given block and no other.
  std::shared_ptr<Block> begin(int chosen) const;
  void end(Block& block) const;

 private:
  std::string key_;
  std::vector<std::string> names_;
};

// Adds Choice and ChoiceBlock to the module, for shared/choices/scoped.py.
void define_choices(pybind11::module_& m);

}  // namespace edgeless
