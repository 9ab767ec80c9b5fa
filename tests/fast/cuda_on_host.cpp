// The CUDA kernels as functions on the host: launches that run every thread of the grid, one after the other.
#include "cuda_on_host.h"

#include "keep.cu"
#include "rotate.cu"
#include "transfer.cu"

template <typename Argument>
static void launch(void (*kernel)(Argument), const Argument* argument, unsigned blocks, unsigned threads) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(*argument);
}

typedef void (*MoveKernel)(Move);
typedef void (*RotateKernel)(Rotation);

// Vectors of 1 << width_log2 bytes. counts: vectors that were not aligned to their size, bytes stored.
extern "C" void launch_move(const Move* move, int scatter, int width_log2, int blocks, int threads, i64* counts) {
    static const MoveKernel kernels[2][5] = {{gather_1, gather_2, gather_4, gather_8, gather_16},
                                             {scatter_1, scatter_2, scatter_4, scatter_8, scatter_16}};
    misaligned_vectors = stored_bytes = 0;
    launch(kernels[scatter][width_log2], move, blocks, threads);
    counts[0] = misaligned_vectors;
    counts[1] = stored_bytes;
}

#define ROTATE_KEY(key) {rotate_##key##_bfloat16, rotate_##key##_float16, rotate_##key##_float32, rotate_##key##_float64}

extern "C" void launch_rotate(const Rotation* rotation, int key_type, int table_type, int blocks, int threads) {
    static const RotateKernel kernels[4][4] = {ROTATE_KEY(bfloat16), ROTATE_KEY(float16), ROTATE_KEY(float32),
                                               ROTATE_KEY(float64)};
    launch(kernels[key_type][table_type], rotation, blocks, threads);
}

// What keep_* does with one thread after the other; homes as its second argument.
extern "C" void launch_keep(const Move* move, const Chunk* homes, int width_log2, int blocks, int threads) {
    static void (*const kernels[5])(Move, const Chunk*) = {keep_1, keep_2, keep_4, keep_8, keep_16};
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < (unsigned)blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < (unsigned)threads; ++threadIdx.x) kernels[width_log2](*move, homes);
}
