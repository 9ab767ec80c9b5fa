// What: the parameter of the kernels that move: a batch, with room for its chunks. Few chunks travel with the launch, so that
//   no table has to reach the device before it; for more, `move.chunks` is a table in device memory.
// Mapping: none. Bytes moved: 8 * (17 + 7 * 32) bytes of parameters a launch.
#pragma once
#include "address.h"

enum : int { kChunksInBatch = 32 };

struct Batch {
    Move move;                     // move.chunks == nullptr: the chunks are these
    Chunk chunks[kChunksInBatch];
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
