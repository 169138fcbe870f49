#pragma once
#include <cstdint>

// Weights below which waking threads costs more than they save.
constexpr int64_t ALONE = 1 << 17;
static int threads_for(int64_t work, int64_t threads) { return work < ALONE ? 1 : (int)threads; }
