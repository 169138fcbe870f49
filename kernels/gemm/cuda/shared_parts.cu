// What all CUDA C++ kernels of words on Hopper share: types, shared memory, 16-bit values, and the
// wait for the kernel before (PDL). IS_BF16 stands before this.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define ONE __device__ __forceinline__

ONE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
ONE u32 lds(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
ONE void lds4(u32 *q, u32 at) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(q[0]), "=r"(q[1]), "=r"(q[2]), "=r"(q[3]) : "r"(at) : "memory");
}
ONE float single(u16 bits) {
#if IS_BF16
  return __uint_as_float((u32)bits << 16);
#else
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
#endif
}
