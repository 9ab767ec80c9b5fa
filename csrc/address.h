// What: the one address model of the move between paged memory and chunks, shared word for word by the CUDA build
//   (NVRTC, nvcc) and the host build. It knows base addresses and byte strides; no layout has a name here.
// Mapping: the tokens of a batch are cut into tiles of up to `tile_tokens` tokens of one chunk; a tile in one plane
//   (kv, layer) is an item. Its rows are (token, piece) pairs, and a row is `piece_bytes` contiguous bytes on both sides.
//   Heads that are contiguous in the plane make one piece a token, others one piece a head. Who takes which item and which
//   bytes of a row: transfer.cu, keep.cu, host.cpp.
// Why it is fast: the place of a row inside a plane depends on its slot and on strides only, so it is found once and serves
//   all planes of equal strides; one batch, however many chunks, layers and ragged ends, is one launch.
// Bytes moved: none here.
#pragma once

#ifdef __CUDACC__
#define LMC_SHARED __host__ __device__ __forceinline__
#else
#define LMC_SHARED static inline
#endif

typedef long long i64;
typedef unsigned long long u64;

// A plane `[NB, BS, NH, HS]` of the engine's memory; HS has stride 1.
struct Plane {
    u64 address;
    i64 block_stride_bytes;
    i64 slot_stride_bytes;
    i64 head_stride_bytes;
};

// A chunk `[TWO, NL, T, NH*HS]` from its first moved token on (it has one); a token's heads are contiguous.
struct Chunk {
    u64 address;
    i64 kv_stride_bytes;
    i64 layer_stride_bytes;
    i64 token_stride_bytes;
    i64 first_token;  // the request's token in row 0: where its slot stands
    i64 num_tokens;
    i64 first_tile;  // tiles of the chunks before it
};

// One batch. Eight bytes a field, so that Python, C++ and CUDA agree on the layout without padding.
struct Move {
    const Plane* planes;       // [num_layers, kv_size]
    const Chunk* chunks;       // [num_chunks]
    const i64* ids;            // [tokens of the request / tokens_per_id]: slots, or block ids
    u64* bad_token;            // smallest token whose id is out of range; all ones while there is none
    i64 num_chunks;
    i64 num_tiles;             // of all chunks
    i64 num_layers;
    i64 kv_size;
    i64 num_ids;               // ids run from 0 up to here: NB*BS, or NB for block ids
    i64 tokens_per_id;         // 1: ids are slots; more: ids are blocks of so many tokens
    i64 block_size;            // BS
    i64 block_shift;           // log2(BS) where BS is a power of two, else -1
    i64 pieces_per_token;      // 1, or NH where the heads of a slot are apart
    i64 piece_bytes;
    i64 tile_tokens;
    i64 first_plane;           // planes are numbered kv * num_layers + layer; moved are those from this one on,
    i64 num_planes;            // so many
    i64 planes_alike;          // 1: all planes of the batch have the same strides
    i64 planes_per_unit;       // device: a thread block takes a tile in so many planes at a stretch
    u64 base_address;          // added to the address of every chunk
};

// Some tokens of one chunk.
struct Tile {
    const Chunk* chunk;
    i64 first_row;             // of the chunk
    i64 num_tokens;
};

// Some planes, one after the other, of one tile: what a thread block of the device takes at a stretch.
struct Unit {
    Tile tile;
    unsigned first_plane;      // counted among those that are moved
    unsigned end_plane;        // one behind the last
};

// A tile in one plane.
struct Item {
    const Plane* plane;
    u64 chunk_address;         // row 0 of the tile
    i64 token_stride_bytes;
    i64 first_token;
    i64 num_tokens;
};

struct Row {
    u64 plane_address;
    u64 chunk_address;
    bool moves;
};

enum : i64 { kNegativeId = -1, kBadId = -2 };

LMC_SHARED i64 num_items(const Move& move) { return move.num_tiles * move.num_planes; }

// The chunk that holds a tile: the last one whose first tile is not after it.
LMC_SHARED const Chunk* chunk_of_tile(const Move& move, i64 tile) {
    i64 low = 0, high = move.num_chunks;
    while (high - low > 1) {
        i64 middle = (low + high) / 2;
        if (move.chunks[middle].first_tile <= tile) low = middle; else high = middle;
    }
    return move.chunks + low;
}

// The index-th tile of a chunk.
LMC_SHARED Tile tile_of_chunk(const Move& move, const Chunk* chunk, i64 index) {
    const i64 first_row = index * move.tile_tokens, left = chunk->num_tokens - first_row;
    Tile tile;
    tile.chunk = chunk;
    tile.first_row = first_row;
    tile.num_tokens = left < move.tile_tokens ? left : move.tile_tokens;
    return tile;
}

LMC_SHARED Tile tile_at(const Move& move, i64 tile) {
    const Chunk* chunk = chunk_of_tile(move, tile);
    return tile_of_chunk(move, chunk, tile - chunk->first_tile);
}

// Units are counted in 32 bits: the tiles of one launch times its planes are far fewer than 2^32.
LMC_SHARED unsigned num_units(const Move& move) {
    const unsigned num_planes = (unsigned)move.num_planes, planes_per_unit = (unsigned)move.planes_per_unit;
    return (num_planes + planes_per_unit - 1) / planes_per_unit * (unsigned)move.num_tiles;
}

// The tiles of the same planes come one after the other.
LMC_SHARED Unit unit_at(const Move& move, unsigned index) {
    const unsigned num_tiles = (unsigned)move.num_tiles, planes_per_unit = (unsigned)move.planes_per_unit;
    const unsigned range = index / num_tiles;
    Unit unit;
    unit.tile = tile_at(move, index - range * num_tiles);
    unit.first_plane = range * planes_per_unit;
    unit.end_plane = unit.first_plane + planes_per_unit;
    if (unit.end_plane > (unsigned)move.num_planes) unit.end_plane = (unsigned)move.num_planes;
    return unit;
}

// A tile in the index-th plane that is moved.
LMC_SHARED Item item_of_tile(const Move& move, const Tile& tile, i64 index) {
    const Chunk& chunk = *tile.chunk;
    const unsigned plane = (unsigned)(move.first_plane + index), num_layers = (unsigned)move.num_layers;
    const unsigned kv = plane / num_layers, layer = plane - kv * num_layers;
    Item item;
    item.plane = move.planes + layer * move.kv_size + kv;
    item.chunk_address = move.base_address + chunk.address + kv * chunk.kv_stride_bytes + layer * chunk.layer_stride_bytes
                       + tile.first_row * chunk.token_stride_bytes;
    item.token_stride_bytes = chunk.token_stride_bytes;
    item.first_token = chunk.first_token + tile.first_row;
    item.num_tokens = tile.num_tokens;
    return item;
}

// The same tile one layer on.
LMC_SHARED void to_next_layer(const Move& move, const Tile& tile, Item* item) {
    item->plane += move.kv_size;
    item->chunk_address += tile.chunk->layer_stride_bytes;
}

// Items numbered in the order of a chunk's memory: chunk, kv, layer, tile.
LMC_SHARED Item item_at(const Move& move, i64 index) {
    const Chunk* chunk = chunk_of_tile(move, index / move.num_planes);
    const i64 inside = index - chunk->first_tile * move.num_planes;
    const i64 tiles = (chunk->num_tokens + move.tile_tokens - 1) / move.tile_tokens;
    const i64 plane = inside / tiles;
    return item_of_tile(move, tile_of_chunk(move, chunk, inside - plane * tiles), plane);
}

// The slot of a token, kNegativeId (skip it) or kBadId (skip it and say so). The id is judged before it is multiplied.
LMC_SHARED i64 slot_of(const Move& move, i64 token) {
    const bool whole_blocks = move.tokens_per_id > 1;
    const i64 index = whole_blocks ? token / move.tokens_per_id : token;
    const i64 id = move.ids[index];
    if (id < 0) return kNegativeId;
    if (id >= move.num_ids) return kBadId;
    return whole_blocks ? id * move.tokens_per_id + (token - index * move.tokens_per_id) : id;
}

// Where a slot begins, from the start of its plane.
LMC_SHARED i64 slot_offset_bytes(const Move& move, const Plane& plane, i64 slot) {
    const i64 block = move.block_shift >= 0 ? slot >> move.block_shift : slot / move.block_size;
    const i64 offset = slot - block * move.block_size;
    return block * plane.block_stride_bytes + offset * plane.slot_stride_bytes;
}

// Both ends of row `row` of an item; rows are (token, piece), the pieces of a token one after the other.
LMC_SHARED Row row_at(const Move& move, const Item& item, i64 row, i64* bad_token) {
    i64 token = row, piece = 0;
    if (move.pieces_per_token > 1) {
        token = (unsigned)row / (unsigned)move.pieces_per_token;  // within one tile
        piece = row - token * move.pieces_per_token;
    }
    const i64 slot = slot_of(move, item.first_token + token);
    *bad_token = slot == kBadId ? item.first_token + token : -1;
    Row found;
    found.moves = slot >= 0;
    found.plane_address = item.plane->address + slot_offset_bytes(move, *item.plane, slot)
                        + piece * item.plane->head_stride_bytes;
    found.chunk_address = item.chunk_address + token * item.token_stride_bytes + piece * move.piece_bytes;
    return found;
}
