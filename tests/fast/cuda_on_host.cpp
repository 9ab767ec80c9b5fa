// The CUDA kernels as functions on the host: launches that run every block of the grid, one after the other.
#include "cuda_on_host.h"

#include "keep.cu"
#include "rotate.cu"
#include "transfer.cu"

typedef void (*MoveKernel)(Batch);
typedef void (*KeepKernel)(Batch, Homes);
typedef void (*RotateKernel)(Rotation);

static struct {
    MoveKernel move;
    KeepKernel keep;
    RotateKernel rotate;
    const Batch* batch;
    const Homes* homes;
    const Rotation* rotation;
} launched;

static void finish(i64* counts) {
    counts[0] = misaligned_vectors;
    counts[1] = stored_bytes;
    counts[2] = split_barriers;
}

static void begin() { misaligned_vectors = stored_bytes = split_barriers = 0; }

// Vectors of 1 << width_log2 bytes. counts: vectors that were not aligned to their size, bytes stored, split barriers.
extern "C" void launch_move(const Batch* batch, int scatter, int width_log2, int blocks, int threads, i64* counts) {
    static const MoveKernel kernels[2][5] = {{gather_1, gather_2, gather_4, gather_8, gather_16},
                                             {scatter_1, scatter_2, scatter_4, scatter_8, scatter_16}};
    begin();
    launched.move = kernels[scatter][width_log2];
    launched.batch = batch;
    run_grid([] { launched.move(*launched.batch); }, blocks, threads);
    finish(counts);
}

// keep_*; homes as its second argument.
extern "C" void launch_keep(const Batch* batch, const Homes* homes, int width_log2, int blocks, int threads, i64* counts) {
    static const KeepKernel kernels[5] = {keep_1, keep_2, keep_4, keep_8, keep_16};
    begin();
    launched.keep = kernels[width_log2];
    launched.batch = batch;
    launched.homes = homes;
    run_grid([] { launched.keep(*launched.batch, *launched.homes); }, blocks, threads);
    finish(counts);
}

#define ROTATE_KEY(key) {rotate_##key##_bfloat16, rotate_##key##_float16, rotate_##key##_float32, rotate_##key##_float64}

extern "C" void launch_rotate(const Rotation* rotation, int key_type, int table_type, int blocks, int threads) {
    static const RotateKernel kernels[4][4] = {ROTATE_KEY(bfloat16), ROTATE_KEY(float16), ROTATE_KEY(float32),
                                               ROTATE_KEY(float64)};
    launched.rotate = kernels[key_type][table_type];
    launched.rotation = rotation;
    run_grid([] { launched.rotate(*launched.rotation); }, blocks, threads);
}
