#include "variant.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

namespace avx2 {
#include "kernels.h"
}

#if defined(__clang__)
#pragma clang attribute pop
#endif

const Kernels avx2_kernels = avx2::kernels;
#endif
