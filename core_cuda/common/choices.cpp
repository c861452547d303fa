#include "choices.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace edgeless {
namespace {

namespace py = pybind11;

using BlocksOfThread = std::vector<std::shared_ptr<Choice::Block>>;  // the blocks of one thread, oldest first

bool is_open(const std::shared_ptr<Choice::Block>& block) { return block->open.load(std::memory_order_relaxed); }

// Torch copies these pointers from the thread that calls backward() to its autograd threads and does not dereference
// them. Several threads may hold the same list, so lists are immutable. They are not Python objects, because freeing a
// list must not need the GIL, which a thread that ends cannot acquire.
const BlocksOfThread* blocks_of_thread(const std::string& key) {
  using at::impl::ThreadLocalPythonObjects;
  if (!ThreadLocalPythonObjects::contains(key)) return nullptr;
  return reinterpret_cast<const BlocksOfThread*>(ThreadLocalPythonObjects::get(key).get());
}

void keep_in_thread(const std::string& key, BlocksOfThread blocks) {
  auto kept = blocks.empty() ? nullptr : std::make_shared<BlocksOfThread>(std::move(blocks));
  at::impl::ThreadLocalPythonObjects::set(key, std::reinterpret_pointer_cast<c10::SafePyObject>(std::move(kept)));
}

BlocksOfThread open_blocks(const std::string& key) {
  BlocksOfThread open;
  if (const BlocksOfThread* all = blocks_of_thread(key)) {
    std::copy_if(all->begin(), all->end(), std::back_inserter(open), is_open);
  }
  return open;
}

}  // namespace

int Choice::chosen() const {
  const BlocksOfThread* blocks = blocks_of_thread(key_);
  if (!blocks) return 0;
  const auto newest = std::find_if(blocks->rbegin(), blocks->rend(), is_open);
  return newest == blocks->rend() ? 0 : (*newest)->chosen;
}

std::shared_ptr<Choice::Block> Choice::begin(int chosen) const {
  auto block = std::make_shared<Block>(chosen);
  BlocksOfThread blocks = open_blocks(key_);
  blocks.push_back(block);
  keep_in_thread(key_, std::move(blocks));
  return block;
}

void Choice::end(Block& block) const {
  block.open = false;
  keep_in_thread(key_, open_blocks(key_));
}

void define_choices(py::module_& m) {
  py::class_<Choice::Block, std::shared_ptr<Choice::Block>>(m, "ChoiceBlock");
  py::class_<Choice> choice(m, "Choice");
  choice.def(py::init<std::string, std::vector<std::string>>(), py::arg("key"), py::arg("names"))
      .def_property_readonly("names", [](const Choice& of) { return py::tuple(py::cast(of.names())); })
      .def_property_readonly("name", [](const Choice& of) { return of.names().at(of.chosen()); })
      .def("begin", &Choice::begin, py::arg("chosen"))
      .def("end", &Choice::end, py::arg("block"));
  // With empty __slots__, old versions of torch.compile read attributes from the object and guard their values.
  choice.attr("__slots__") = py::tuple();
}

}  // namespace edgeless
