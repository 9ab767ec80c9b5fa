// What: the parameters of the kernels that move: a batch, with room for its chunks, and for slots. Few chunks and few slots
//   travel with the launch, so that nothing has to reach the device before it (a copy before a kernel costs 9 us on an
//   H200); for more, `move.chunks` and `move.ids` are tables in device memory.
// Mapping: none. Bytes moved: 8 * (20 + 7 * 32) bytes of parameters a launch, and 8 * 256 for slots; 4096 are allowed.
#pragma once
#include "address.h"

enum : int { kChunksInBatch = 32, kSlotsInBatch = 256 };

struct Batch {
    Move move;                     // move.chunks == nullptr: the chunks are these
    Chunk chunks[kChunksInBatch];
};

struct BatchAndSlots {
    Batch batch;                   // batch.move.ids == nullptr: the slots are these
    i64 slots[kSlotsInBatch];
};

// Where the chunks of a batch are at home, in the same order.
struct Homes {
    Chunk chunks[kChunksInBatch];
};

LMC_SHARED Move move_of(const Batch& batch) {
    Move move = batch.move;
    if (!move.chunks) move.chunks = batch.chunks;
    return move;
}

LMC_SHARED Move move_of(const BatchAndSlots& launch) {
    Move move = move_of(launch.batch);
    if (!move.ids) move.ids = launch.slots;
    return move;
}
