// What: before a staged chunk is copied back whole, the rows of skipped tokens are read from the chunk's home in host memory
//   into the staging rows, so that the copy writes them back as they were. Which tokens those are only the slots say.
// Mapping: items and rows as address.h numbers them; a warp takes an item, its lanes the vectors of one row after the other. A
//   row that moves costs one look at its slot.
// Why it is fast: skipped rows are rare; only they cross the link, in vectors of up to 16 bytes by neighbouring lanes.
// Bytes moved: 2 * skipped tokens * num_layers * kv_size * NH*HS*element bytes, plus 8 bytes of slot a row.
#include "batch.h"

template <typename Vector>
__device__ __forceinline__ void keep_rows(const Move& move, const Chunk* homes) {
    Move home = move;
    home.chunks = homes;  // the same tokens and tiles at other addresses and strides
    home.base_address = 0;
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 warps = (i64)gridDim.x * blockDim.x / 32;
    const i64 vectors = move.piece_bytes / (i64)sizeof(Vector);
    for (i64 index = thread / 32; index < num_items(move); index += warps) {
        const Item staged_item = item_at(move, index), home_item = item_at(home, index);
        for (i64 row = 0; row < staged_item.num_tokens * move.pieces_per_token; ++row) {
            i64 bad_token;
            const Row staged = row_at(move, staged_item, row, &bad_token);
            if (staged.moves) continue;
            const Row kept = row_at(home, home_item, row, &bad_token);
            for (i64 v = thread % 32; v < vectors; v += 32)
                __stcs((Vector*)staged.chunk_address + v, __ldcs((const Vector*)kept.chunk_address + v));
        }
    }
}

// keep_16, ...: the vector width in bytes, which must divide every address, stride and piece on both sides.
#define LMC_KEEP(width, Vector)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                            \
        keep_##width(const __grid_constant__ Batch batch, const __grid_constant__ Homes homes) {                   \
        keep_rows<Vector>(move_of(batch), homes.chunks);                                                           \
    }

LMC_KEEP(16, uint4)
LMC_KEEP(8, uint2)
LMC_KEEP(4, unsigned int)
LMC_KEEP(2, unsigned short)
LMC_KEEP(1, unsigned char)
