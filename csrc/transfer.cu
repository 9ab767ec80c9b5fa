// What: gather (engine to chunks) and scatter (chunks to engine) of one batch: any number of chunks, layers and ragged
//   ends in one launch. Built by NVRTC; tests run the same text on the host, thread by thread.
// Mapping: a warp takes items in grid stride (address.h says what an item is). `lanes_per_row` neighbouring lanes share
//   a row, so a warp works on 32 / lanes_per_row rows at once; lane l moves vectors l, l + lanes_per_row, ... of it.
// Why it is fast: neighbouring lanes touch neighbouring vectors (up to 16 bytes each) on both sides; each lane has
//   LMC_ROWS_IN_FLIGHT loads under way before its first store; loads and stores are marked as streaming, so the
//   engine's working set stays in L2; a short row takes few lanes, so that none idles.
// Bytes moved: each row is read once and written once, 2 * num_tokens * num_layers * kv_size * NH*HS*element bytes, plus
//   8 bytes of slot a row. Rows of skipped tokens are neither read nor written.
#include "address.h"

#ifndef LMC_ROWS_IN_FLIGHT
#define LMC_ROWS_IN_FLIGHT 4
#endif

template <typename Vector, bool kScatter>
__device__ __forceinline__ void move_rows(const Move& move, const Item& item, i64 group, i64 lane) {
    const i64 rows = item.num_tokens * move.pieces_per_token;
    const i64 groups = 32 / move.lanes_per_row;
    const i64 vectors = move.piece_bytes / (i64)sizeof(Vector);
    for (i64 first = group; first < rows; first += groups * LMC_ROWS_IN_FLIGHT) {
        const Vector* source[LMC_ROWS_IN_FLIGHT];
        Vector* target[LMC_ROWS_IN_FLIGHT];
        bool moves[LMC_ROWS_IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < LMC_ROWS_IN_FLIGHT; ++u) {
            const i64 row = first + u * groups;
            moves[u] = row < rows;
            if (!moves[u]) continue;
            i64 bad_token;
            const Row found = row_at(move, item, row, &bad_token);
            if (bad_token >= 0 && lane == 0) atomicMin(move.bad_token, (u64)bad_token);
            moves[u] = found.moves;
            source[u] = (const Vector*)(kScatter ? found.chunk_address : found.plane_address);
            target[u] = (Vector*)(kScatter ? found.plane_address : found.chunk_address);
        }
        for (i64 v = lane; v < vectors; v += move.lanes_per_row) {
            Vector data[LMC_ROWS_IN_FLIGHT];
#pragma unroll
            for (int u = 0; u < LMC_ROWS_IN_FLIGHT; ++u)
                if (moves[u]) data[u] = __ldcs(source[u] + v);
#pragma unroll
            for (int u = 0; u < LMC_ROWS_IN_FLIGHT; ++u)
                if (moves[u]) __stcs(target[u] + v, data[u]);
        }
    }
}

template <typename Vector, bool kScatter>
__device__ __forceinline__ void move_items(const Move& move) {
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 warps = (i64)gridDim.x * blockDim.x / 32;
    const i64 lane_in_warp = thread % 32;
    const i64 group = lane_in_warp / move.lanes_per_row;
    const i64 lane = lane_in_warp - group * move.lanes_per_row;
    for (i64 index = thread / 32; index < num_items(move); index += warps)
        move_rows<Vector, kScatter>(move, item_at(move, index), group, lane);
}

// gather_16, scatter_16, ...: the vector width in bytes, which must divide every address, stride and piece of the batch.
#define LMC_KERNELS(width, Vector)                                                                       \
    extern "C" __global__ void __launch_bounds__(256) gather_##width(Move move) {                        \
        move_items<Vector, false>(move);                                                                 \
    }                                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) scatter_##width(Move move) {                       \
        move_items<Vector, true>(move);                                                                  \
    }

LMC_KERNELS(16, uint4)
LMC_KERNELS(8, uint2)
LMC_KERNELS(4, unsigned int)
LMC_KERNELS(2, unsigned short)
LMC_KERNELS(1, unsigned char)
