// The CUDA kernels as functions on the host: launches that run every block of the grid, one after the other.
#include "cuda_on_host.h"

#include "keep.cu"
#include "rotate.cu"
#include "transfer.cu"

typedef void (*MoveKernel)(BatchAndSlots);
typedef void (*KeepKernel)(Batch, Homes);
typedef void (*RotateKernel)(Rotation);
typedef void (*ScatterRotatedKernel)(Batch, Rotation);

static struct {
    MoveKernel move;
    KeepKernel keep;
    RotateKernel rotate;
    ScatterRotatedKernel scatter_rotated;
    const BatchAndSlots* launch;
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
extern "C" void launch_move(const BatchAndSlots* launch, int scatter, int width_log2, int blocks, int threads, i64* counts) {
    static const MoveKernel kernels[2][5] = {{gather_1, gather_2, gather_4, gather_8, gather_16},
                                             {scatter_1, scatter_2, scatter_4, scatter_8, scatter_16}};
    begin();
    launched.move = kernels[scatter][width_log2];
    launched.launch = launch;
    run_grid([] { launched.move(*launched.launch); }, blocks, threads);
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

#define OF_KEY(name, key) {name##_##key##_bfloat16, name##_##key##_float16, name##_##key##_float32, name##_##key##_float64}
#define OF_ALL_KEYS(name) {OF_KEY(name, bfloat16), OF_KEY(name, float16), OF_KEY(name, float32), OF_KEY(name, float64)}

extern "C" void launch_rotate(const Rotation* rotation, int key_type, int table_type, int blocks, int threads) {
    static const RotateKernel kernels[4][4] = OF_ALL_KEYS(rotate);
    launched.rotate = kernels[key_type][table_type];
    launched.rotation = rotation;
    run_grid([] { launched.rotate(*launched.rotation); }, blocks, threads);
}

// scatter_rotated_*; counts as of launch_move.
extern "C" void launch_scatter_rotated(const Batch* batch, const Rotation* rotation, int key_type, int table_type, int blocks,
                                       int threads, i64* counts) {
    static const ScatterRotatedKernel kernels[4][4] = OF_ALL_KEYS(scatter_rotated);
    begin();
    launched.scatter_rotated = kernels[key_type][table_type];
    launched.batch = batch;
    launched.rotation = rotation;
    run_grid([] { launched.scatter_rotated(*launched.batch, *launched.rotation); }, blocks, threads);
    finish(counts);
}
