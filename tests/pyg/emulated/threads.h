// The threads of a block as coroutines of one thread, which run in turns until all are done. `FIRST_LAST` is defined
// where the last thread runs first: a missing barrier shows in one of both orders.
#pragma once

#include <ucontext.h>

#include <cstdio>
#include <functional>
#include <map>
#include <vector>

#include "emulated.h"

Place blockIdx, gridDim, threadIdx;
uint4* dynamic_memory;

namespace threads {

constexpr int kCount = 128;
constexpr size_t kStack = 1 << 18;

struct Meeting {
  uint64_t given[32], seen[2][32];
  unsigned arrived = 0;
  int round = 0;
};

static ucontext_t scheduler, contexts[kCount];
static std::vector<char> stacks[kCount];
static bool done[kCount];
static int left, waiting, barriers;
static std::map<std::pair<int, unsigned>, Meeting> meetings;  // by warp and mask
static const std::function<void()>* work;

[[noreturn]] static void fail(const char* why) {
  fprintf(stderr, "%s\n", why);
  abort();
}

static void yield() { swapcontext(&contexts[threadIdx.x], &scheduler); }

static void enter() {
  (*work)();
  done[threadIdx.x] = true;
  --left;
  yield();
}

static void run_block(const std::function<void()>& body) {
  work = &body, left = kCount, waiting = 0;
  meetings.clear();
  for (int i = 0; i < kCount; ++i) {
    stacks[i].resize(kStack);
    done[i] = false;
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = stacks[i].data(), contexts[i].uc_stack.ss_size = kStack;
    contexts[i].uc_link = &scheduler;
    makecontext(&contexts[i], enter, 0);
  }
  for (int idle = 0; left > 0; ++idle) {
    if (idle > 1 << 20) fail("threads wait for each other");
    for (int k = 0; k < kCount; ++k) {
#ifdef FIRST_LAST
      threadIdx.x = kCount - 1 - k;
#else
      threadIdx.x = k;
#endif
      if (!done[threadIdx.x]) swapcontext(&scheduler, &contexts[threadIdx.x]);
    }
  }
}

}  // namespace threads

void __syncthreads() {
  using namespace threads;
  const int before = barriers;
  if (++waiting == kCount) {
    waiting = 0, ++barriers;
  } else {
    while (barriers == before) yield();
  }
}

const uint64_t* meet(unsigned mask, uint64_t given) {
  using namespace threads;
  const unsigned lane = threadIdx.x % 32;
  Meeting& meeting = meetings[{threadIdx.x / 32, mask}];
  if (!(mask >> lane & 1) || meeting.arrived >> lane & 1) fail("a lane exchanges values that others do not wait for");
  meeting.given[lane] = given, meeting.arrived |= 1u << lane;
  const int round = meeting.round;
  if (meeting.arrived == mask) {
    memcpy(meeting.seen[round % 2], meeting.given, sizeof(meeting.given));
    meeting.arrived = 0, ++meeting.round;
  } else {
    while (meeting.round == round) yield();
  }
  return meeting.seen[round % 2];
}
