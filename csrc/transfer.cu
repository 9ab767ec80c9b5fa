// What: gather (engine to chunks) and scatter (chunks to engine) of one batch: any number of chunks, layers and ragged
//   ends in one launch. Built by NVRTC; tests run the same text on the host, block by block.
// Mapping: a unit is one tile in `planes_per_unit` planes; thread blocks take units in grid stride, the tiles of the same
//   planes one after the other. For a tile the threads find where its rows lie (`RowPlace`, in shared memory); then
//   neighbouring threads move neighbouring vectors of up to 16 bytes, row after row, so that the whole block reads and
//   writes one stretch of both sides, and blocks that run at the same time are in the same planes.
// Why it is fast: slots are read and addresses are multiplied out once a unit, not once a vector; planes of equal strides
//   share them. What is left for a vector is a look into shared memory and two additions, no division. That fits 32
//   registers, so that LMC_BLOCKS_RESIDENT blocks fill a multiprocessor with threads, each with LMC_VECTORS_IN_FLIGHT loads
//   under way before its first store. (On an H200 more blocks beat more loads a thread: 8 x 2 moves 87 % of what a device
//   copy does on rows of 2 KiB, 4 x 4 moves 84 %; on rows of 256 bytes 81 and 77 %.)
// Bytes moved: each row is read once and written once, 2 * num_tokens * num_layers * kv_size * NH*HS*element bytes, plus
//   8 bytes of slot a token and tile. Rows of skipped tokens are neither read nor written.
#include "batch.h"

#ifndef LMC_VECTORS_IN_FLIGHT
#define LMC_VECTORS_IN_FLIGHT 2
#endif
#ifndef LMC_BLOCKS_RESIDENT
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define LMC_BLOCKS_RESIDENT 4  // there the same text needs more registers, and spills with more blocks
#else
#define LMC_BLOCKS_RESIDENT 8
#endif
#endif
#ifndef LMC_ROWS_KNOWN
#define LMC_ROWS_KNOWN 256
#endif

// Where a row begins, from the start of its plane and of its tile's first chunk row. in_plane < 0: the row stays.
struct RowPlace {
    i64 in_plane;
    i64 in_chunk;
};

// All threads of the block: the places of `rows` rows from `first_row` on.
__device__ __forceinline__ void find_places(const Move& move, const Item& item, const Plane& plane, unsigned first_row,
                                            unsigned rows, RowPlace* places) {
    const unsigned pieces = (unsigned)move.pieces_per_token;
    for (unsigned r = threadIdx.x; r < rows; r += blockDim.x) {
        const unsigned row = first_row + r, token = row / pieces, piece = row - token * pieces;
        const i64 slot = slot_of(move, item.first_token + token);
        if (slot == kBadId) atomicMin(move.bad_token, (u64)(item.first_token + token));
        places[r].in_plane = slot < 0 ? -1 : slot_offset_bytes(move, plane, slot) + piece * plane.head_stride_bytes;
        places[r].in_chunk = token * item.token_stride_bytes + piece * move.piece_bytes;
    }
}

// How far the vectors of a thread are apart: so many rows, and so many vectors in the row.
struct Walk {
    unsigned vectors_per_row, row_step, vector_step;
};

// All threads of the block: the vectors of `rows` rows.
template <typename Vector, bool kScatter>
__device__ __forceinline__ void move_rows(const Walk& walk, u64 plane_address, u64 chunk_address, unsigned rows,
                                          const RowPlace* places) {
    unsigned row = threadIdx.x / walk.vectors_per_row, vector = threadIdx.x - row * walk.vectors_per_row;
    while (row < rows) {
        Vector* target[LMC_VECTORS_IN_FLIGHT];  // nullptr: nothing to move
        Vector data[LMC_VECTORS_IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < LMC_VECTORS_IN_FLIGHT; ++u) {
            target[u] = nullptr;
            if (row < rows && places[row].in_plane >= 0) {
                Vector* on_plane = (Vector*)(plane_address + places[row].in_plane) + vector;
                Vector* on_chunk = (Vector*)(chunk_address + places[row].in_chunk) + vector;
                data[u] = __ldcs(kScatter ? on_chunk : on_plane);
                target[u] = kScatter ? on_plane : on_chunk;
            }
            row += walk.row_step;
            vector += walk.vector_step;
            if (vector >= walk.vectors_per_row) {
                vector -= walk.vectors_per_row;
                ++row;
            }
        }
#pragma unroll
        for (int u = 0; u < LMC_VECTORS_IN_FLIGHT; ++u)
            if (target[u]) __stcs(target[u], data[u]);
    }
}

template <typename Vector, bool kScatter> __device__ __forceinline__ void move_batch(const Move& move) {
    __shared__ RowPlace places[LMC_ROWS_KNOWN];
    Walk walk;
    walk.vectors_per_row = (unsigned)(move.piece_bytes / (i64)sizeof(Vector));
    walk.row_step = blockDim.x / walk.vectors_per_row;
    walk.vector_step = blockDim.x - walk.row_step * walk.vectors_per_row;

    const unsigned units = num_units(move);
    for (unsigned index = blockIdx.x; index < units; index += gridDim.x) {
        const Unit unit = unit_at(move, index);
        const unsigned rows = (unsigned)(unit.tile.num_tokens * move.pieces_per_token);
        bool known = false;  // whether the places are this tile's, and serve every plane
        for (unsigned plane = unit.first_plane; plane < unit.end_plane; ++plane) {
            const Item item = item_of_tile(move, unit.tile, plane);
            for (unsigned first_row = 0; first_row < rows; first_row += LMC_ROWS_KNOWN) {
                const unsigned here = rows - first_row < LMC_ROWS_KNOWN ? rows - first_row : LMC_ROWS_KNOWN;
                if (!known) {
                    __syncthreads();  // nobody needs the old ones any more
                    find_places(move, item, *item.plane, first_row, here, places);
                    __syncthreads();
                    known = move.planes_alike && rows <= LMC_ROWS_KNOWN;
                }
                move_rows<Vector, kScatter>(walk, item.plane->address, item.chunk_address, here, places);
            }
        }
    }
}

// gather_16, scatter_16, ...: the vector width in bytes, which must divide every address, stride and piece of the batch.
#define LMC_KERNEL(name, Vector, kScatter)                                                             \
    extern "C" __global__ void __launch_bounds__(256, LMC_BLOCKS_RESIDENT)                             \
        name(const __grid_constant__ BatchAndSlots launch) {                                           \
        move_batch<Vector, kScatter>(move_of(launch));                                                 \
    }
#define LMC_KERNELS(width, Vector)                                                                     \
    LMC_KERNEL(gather_##width, Vector, false)                                                          \
    LMC_KERNEL(scatter_##width, Vector, true)

LMC_KERNELS(16, uint4)
LMC_KERNELS(8, uint2)
LMC_KERNELS(4, unsigned int)
LMC_KERNELS(2, unsigned short)
LMC_KERNELS(1, unsigned char)
