// What a user chooses for a block of code, for the thread that is in it and for what works for that thread: threads of
// autograd take it over from the thread that called backward(), as they take over torch's own settings.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace edgeless {

// Of several names, the first of which holds outside of all blocks.
class Choice {
 public:
  // A block of code, from its beginning to its end.
  struct Block {
    explicit Block(int chosen) : chosen(chosen) {}
    const int chosen;
    std::atomic<bool> open{true};
  };

  Choice(std::string key, std::vector<std::string> names) : key_(std::move(key)), names_(std::move(names)) {}

  const std::vector<std::string>& names() const { return names_; }
  int chosen() const;  // of the names, by the newest block that this thread is in

  // Blocks of several tasks or generators of one thread end in any order, and perhaps in another thread than that of
  // their beginning: each takes away itself and nothing else.
  std::shared_ptr<Block> begin(int chosen) const;
  void end(Block& block) const;

 private:
  std::string key_;
  std::vector<std::string> names_;
};

// Adds what shared/choices.py has to the module.
void define_choices(pybind11::module_& m);

}  // namespace edgeless
