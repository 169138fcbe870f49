// Attention over a low-bit cache's blocks, called through ctypes (library.py); compiled as products.cpp is.
#include <omp.h>

#include "packed_attend.h"
#include "threads.h"

extern "C" {

// As llmpq_attend_blocks over a cache's blocks of codes, of keys and of values with bits of their own (packed_attend.h);
// pools: words and parameters of keys, of values, rings of keys and of values; sizes: B, H, G, D, channels, ring, columns,
// holdback, window.
void llmpq_attend_packed(const void* q, void* o, const void* const* pools, const int32_t* table, const int64_t* slots,
                         const int64_t* last, const int64_t* sizes, const float* scale_cap, const float* slopes,
                         const float* sinks, int64_t key_bits, int64_t value_bits, int64_t dtype, int64_t threads) {
  int64_t B = sizes[0], H = sizes[1], seen = 0;
  Packed pool{(const uint32_t*)pools[0], (const uint32_t*)pools[2], (const uint16_t*)pools[1],
              (const uint16_t*)pools[3], pools[4], pools[5], sizes[2], sizes[3], sizes[4], sizes[5],
              key_bits, value_bits};
  Rule rule{sizes[8], scale_cap[0], scale_cap[1], slopes, sinks};
  for (int64_t b = 0; b < B; ++b) seen += last[b] + 1;
  attend_packed_of(pool, q, o, table, slots, last, B, H, sizes[6], sizes[7], rule, dtype,
                   threads_for(seen * H * sizes[3] * 2, threads));
}

}  // extern "C"
