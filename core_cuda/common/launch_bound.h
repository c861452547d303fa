// From how many rows on the GPU is what takes the time, and below which the host.
#pragma once

#include <cstdint>

namespace edgeless {

// Below, a product takes less time than its launch: as few as possible, and copies cost nothing.
constexpr int64_t kLaunchBoundRows = 1 << 15;

}  // namespace edgeless
