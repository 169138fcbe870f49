// Attention over the cache's blocks, called through ctypes (library.py); compiled as products.cpp is.
#include <omp.h>

#include "attend.h"
#include "threads.h"

extern "C" {

// o [B, H, D] of one query per row over its blocks of k and v [places, G, D]; scale and slopes [H] (or
// null) are floats.
void llmpq_attend_blocks(const void* q, const void* k, const void* v, void* o, const int64_t* tables,
                         const int64_t* ends, const float* scale, const float* slopes, int64_t B, int64_t H, int64_t G,
                         int64_t D, int64_t columns, int64_t window, int64_t number, int64_t threads) {
  int64_t seen = 0;
  for (int64_t b = 0; b < B; ++b) seen += window && ends[b] > window ? window : ends[b];
  auto run = number == FLOAT32 ? attend_rows<FLOAT32> : number == BFLOAT16 ? attend_rows<BFLOAT16> : attend_rows<FLOAT16>;
  run(k, v, q, o, tables, ends, B, H, G, D, columns, window, *scale, slopes, threads_for(seen * H * D * 2, threads));
}

}  // extern "C"
