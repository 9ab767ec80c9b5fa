// Just enough of CUDA for a C++ compiler to take csrc/*.cu: the kernels run on the host, thread after thread. That is
// faithful for kernels whose threads do not talk to each other, and these do not. Counted is what the result does not
// show: vectors that are not aligned to their size, and bytes stored, as a row moved twice looks like one moved once.
#pragma once

#include <cstdint>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct Extent { unsigned int x; };

static thread_local Extent threadIdx, blockIdx, blockDim, gridDim;
static long long misaligned_vectors = 0, stored_bytes = 0;

template <typename T> T __ldcs(const T* address) {
    misaligned_vectors += reinterpret_cast<std::uintptr_t>(address) % sizeof(T) != 0;
    T value;
    __builtin_memcpy(&value, address, sizeof(T));
    return value;
}

template <typename T> void __stcs(T* address, T value) {
    misaligned_vectors += reinterpret_cast<std::uintptr_t>(address) % sizeof(T) != 0;
    stored_bytes += sizeof(T);
    __builtin_memcpy(address, &value, sizeof(T));
}

inline void atomicMin(unsigned long long* address, unsigned long long value) {
    if (value < *address) *address = value;
}
