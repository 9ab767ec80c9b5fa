// Just enough of CUDA for a C++ compiler to take csrc/*.cu: the kernels run on the host, block after block. The threads of a
// block run one after the other, each up to the next barrier. Counted is what the result does not show: vectors that are
// not aligned to their size, bytes stored (a row moved twice looks like one moved once), and barriers that some threads of
// a block reached and others did not.
#pragma once

// Some systems' compilers define it, and then longjmp refuses the stacks that the threads here have.
#undef _FORTIFY_SOURCE

#include <ucontext.h>

#include <csetjmp>
#include <cstdint>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct Extent { unsigned int x; };

static Extent threadIdx, blockIdx, blockDim, gridDim;
static long long misaligned_vectors = 0, stored_bytes = 0, split_barriers = 0;

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

// A thread of the block that runs: its stack, and where it goes on.
struct Thread {
    std::vector<char> stack = std::vector<char>(64 << 10);
    ucontext_t start;
    jmp_buf here;
    bool begun, ended;
};

static std::vector<Thread> threads_of_block;
static jmp_buf scheduler;
static void (*thread_body)();

inline void __syncthreads() {
    if (!_setjmp(threads_of_block[threadIdx.x].here)) _longjmp(scheduler, 1);
}

inline void run_thread() {
    thread_body();
    threads_of_block[threadIdx.x].ended = true;
    _longjmp(scheduler, 1);
}

// A thread goes on to its next barrier or its end.
inline void resume(Thread& thread) {
    if (_setjmp(scheduler)) return;
    if (thread.begun) _longjmp(thread.here, 1);
    thread.begun = true;
    setcontext(&thread.start);
}

// Every block of the grid, one after the other.
inline void run_grid(void (*body)(), unsigned blocks, unsigned threads) {
    gridDim.x = blocks;
    blockDim.x = threads;
    thread_body = body;
    if (threads_of_block.size() < threads) threads_of_block.resize(threads);
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (unsigned t = 0; t < threads; ++t) {
            Thread& thread = threads_of_block[t];
            thread.begun = thread.ended = false;
            getcontext(&thread.start);
            thread.start.uc_stack.ss_sp = thread.stack.data();
            thread.start.uc_stack.ss_size = thread.stack.size();
            thread.start.uc_link = nullptr;
            makecontext(&thread.start, run_thread, 0);
        }
        for (unsigned running = threads; running > 0;) {
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
                if (!threads_of_block[threadIdx.x].ended) resume(threads_of_block[threadIdx.x]);
            unsigned left = 0;
            for (unsigned t = 0; t < threads; ++t) left += !threads_of_block[t].ended;
            split_barriers += left != 0 && left != running;
            running = left;
        }
    }
}
