#include "pool.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#ifdef __linux__
#include <pthread.h>
#include <sys/mman.h>
#endif

namespace edgeless::cpu {
namespace {

constexpr std::size_t kLargePage = std::size_t{2} << 20;

#ifdef __linux__
// A block that waits for its next use, and the count of take() calls when it was freed.
struct Idle {
  Block block;
  std::uint64_t since;
};

void unmap(const Block& block) { munmap(block.data, block.capacity); }

Block map(std::size_t bytes) {
  const std::size_t room = bytes + kLargePage;
  void* memory = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return {};
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t begin = (first + kLargePage - 1) / kLargePage * kLargePage;
  char* data = static_cast<char*>(memory) + (begin - first);
  if (begin > first) munmap(memory, begin - first);
  const std::size_t after = room - (begin - first) - bytes;
  if (after > 0) munmap(data + bytes, after);
#ifdef MADV_HUGEPAGE
  madvise(data, bytes, MADV_HUGEPAGE);  // only advice: failure is harmless
#endif
  return {data, bytes};
}

class Pool {
 public:
  // The forking thread holds the lock during fork(): else the child could inherit a lock held by a thread that does not
  // exist in the child, and deadlock.
  void hold() { mutex_.lock(); }
  void let_go() { mutex_.unlock(); }

  Block take(std::size_t bytes) {
    const std::size_t size = (bytes + kLargePage - 1) / kLargePage * kLargePage;
    const std::lock_guard<std::mutex> lock(mutex_);
    ++takes_;
    drop_old();
    // Best fit; a block more than an eighth too large is left for larger results.
    auto best = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      const std::size_t capacity = it->block.capacity;
      if (capacity < size || capacity > size + size / 8) continue;
      if (best == idle_.end() || capacity < best->block.capacity) best = it;
    }
    if (best != idle_.end()) {
      const Block block = best->block;
      idle_.erase(best);
      return block;
    }
    // Before mapping new memory, unmap as much idle memory, so that used and idle blocks together stay within the peak
    // of the memory in use.
    for (std::size_t given = 0; given < size && !idle_.empty();) {
      given += idle_.front().block.capacity;
      unmap(idle_.front().block);
      idle_.erase(idle_.begin());
    }
    return map(size);
  }

  void give(const Block& block) {
    const std::lock_guard<std::mutex> lock(mutex_);
#ifdef MADV_FREE
    madvise(block.data, block.capacity, MADV_FREE);
#endif
    idle_.push_back({block, takes_});
  }

  void release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Idle& idle : idle_) unmap(idle.block);
    idle_.clear();
  }

  std::size_t bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::size_t total = 0;
    for (const Idle& idle : idle_) total += idle.block.capacity;
    return total;
  }

 private:
  static constexpr std::uint64_t kPatience = 256;  // take() calls: several training steps of a deep model

  void drop_old() {
    while (!idle_.empty() && takes_ - idle_.front().since > kPatience) {
      unmap(idle_.front().block);
      idle_.erase(idle_.begin());
    }
  }

  std::mutex mutex_;
  std::vector<Idle> idle_;  // longest idle first
  std::uint64_t takes_ = 0;
};

// Never destroyed: a tensor may outlive every static object. Created when the library is loaded, not at the first use,
// during which another thread could fork.
Pool& pool = *new Pool;

[[maybe_unused]] const int at_fork = pthread_atfork([] { pool.hold(); }, [] { pool.let_go(); }, [] { pool.let_go(); });

// Read on every call: caching the choice in a static variable would add a lock that a fork could leave held.
bool wanted() {
  const char* choice = std::getenv("EDGELESS_POOL");
  return !(choice && std::strcmp(choice, "0") == 0);
}
#endif

}  // namespace

#ifdef __linux__
Block take_block(std::size_t bytes) { return wanted() ? pool.take(bytes) : Block{}; }
void give_block(Block block) noexcept { pool.give(block); }
void release_blocks() noexcept { pool.release(); }
std::size_t pooled_bytes() noexcept { return pool.bytes(); }
#else
Block take_block(std::size_t) { return {}; }
void give_block(Block) noexcept {}
void release_blocks() noexcept {}
std::size_t pooled_bytes() noexcept { return 0; }
#endif

}  // namespace edgeless::cpu
