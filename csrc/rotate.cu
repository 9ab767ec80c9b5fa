// What: re-rotation of keys (arithmetic: rotate.h), in place (rotate_*), or on the way from chunks to pages: a scatter of key
//   planes (scatter_rotated_*; values go by transfer.cu). One launch for all tokens, heads and pairs. Built by NVRTC; tests
//   run the same text on the host, thread by thread.
// Mapping: a thread takes one (token, pair) and rotates that pair in every head; neighbouring threads take neighbouring
//   pairs, then the next token. On the way of a scatter a block takes a tile in `planes_per_unit` planes, and a thread the
//   same pair in all of them; behind the pairs come the dims that are not rotated, one a thread.
// Why it is fast: cosines, sines and the norm are computed once for all heads and layers, and so is the slot; neighbouring
//   threads touch neighbouring dims; four heads, on the way two, are loaded before the first is stored. In place, tokens
//   that do not move cost two loads. On the way, keys are read once and written once, as by any scatter.
// Bytes moved: in place 2 * moved tokens * NH * rotary_dim * element bytes; on the way 2 * num_tokens * num_layers * NH*HS *
//   element bytes, as by a scatter. Plus two rows of the table a token (and unit).
#include "batch.h"
#include "rotate.h"

#define LMC_HEADS_IN_FLIGHT 4
#define LMC_COLUMNS_IN_FLIGHT 2  // on the way; with them 64 registers suffice, and four blocks are resident

template <typename Key, typename Table>
__device__ __forceinline__ void rotate_pair_of_all_heads(const Rotation& rotation, i64 token, i64 pair) {
    typedef typename RealOf<Key>::type Real;
    const i64 old_position = rotation.old_positions[token], new_position = rotation.new_positions[token];
    if (old_position == new_position && is_in_table(rotation, old_position)) return;
    const bool in_table = is_in_table(rotation, old_position) && is_in_table(rotation, new_position);
    Angle<Real> angle = {};
    if (in_table) angle = angle_at<Real, Table>(rotation, old_position, new_position, pair);
    if (!in_table || !can_undo(angle.norm)) {
        atomicMin(rotation.bad_token, (u64)token);
        return;
    }
    const u64 x_address = rotation.keys_address + token * rotation.token_stride_bytes
                        + pair * rotation.pair_stride_dims * rotation.dim_stride_bytes;
    const u64 y_address = x_address + rotation.partner_stride_dims * rotation.dim_stride_bytes;
    for (i64 first = 0; first < rotation.num_heads; first += LMC_HEADS_IN_FLIGHT) {
        Key x_key[LMC_HEADS_IN_FLIGHT], y_key[LMC_HEADS_IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < LMC_HEADS_IN_FLIGHT; ++u) {
            if (first + u >= rotation.num_heads) continue;
            x_key[u] = *(const Key*)(x_address + (first + u) * rotation.head_stride_bytes);
            y_key[u] = *(const Key*)(y_address + (first + u) * rotation.head_stride_bytes);
        }
#pragma unroll
        for (int u = 0; u < LMC_HEADS_IN_FLIGHT; ++u) {
            if (first + u >= rotation.num_heads) continue;
            Real x = widened(x_key[u]), y = widened(y_key[u]);
            rerotate_pair(angle, &x, &y);
            round_to(x, (Key*)(x_address + (first + u) * rotation.head_stride_bytes));
            round_to(y, (Key*)(y_address + (first + u) * rotation.head_stride_bytes));
        }
    }
}

template <typename Key, typename Table> __device__ __forceinline__ void rotate_all(const Rotation& rotation) {
    const i64 threads = (i64)gridDim.x * blockDim.x;
    const i64 count = rotation.num_tokens * rotation.num_pairs;
    for (i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x; index < count; index += threads) {
        const i64 token = index / rotation.num_pairs;
        rotate_pair_of_all_heads<Key, Table>(rotation, token, index - token * rotation.num_pairs);
    }
}

// ---------------------------------------------------------------------------------------------- on the way

template <int kBytes> struct WordOf;
template <> struct WordOf<2> { typedef unsigned short type; };
template <> struct WordOf<4> { typedef unsigned int type; };
template <> struct WordOf<8> { typedef unsigned long long type; };

// A key's bits are what is read and written.
template <typename Key> union KeyBits {
    typename WordOf<sizeof(Key)>::type word;
    Key key;
};

template <typename Key> __device__ __forceinline__ Key load_key(u64 address) {
    KeyBits<Key> bits;
    bits.word = __ldcs((const decltype(bits.word)*)address);
    return bits.key;
}

template <typename Key> __device__ __forceinline__ void store_key(u64 address, Key key) {
    KeyBits<Key> bits;
    bits.key = key;
    __stcs((decltype(bits.word)*)address, bits.word);
}

// One column of a token, which is a pair or, behind the pairs, a dim that is not rotated: in every head of a unit's planes.
template <typename Key, typename Table>
__device__ __forceinline__ void scatter_column(const Move& move, const Rotation& rotation, const Unit& unit, unsigned row,
                                               unsigned column) {
    typedef typename RealOf<Key>::type Real;
    Item item = item_of_tile(move, unit.tile, unit.first_plane);
    const i64 token = item.first_token + row, slot = slot_of(move, token);
    if (slot == kBadId && column == 0) atomicMin(move.bad_token, (u64)token);
    if (slot < 0) return;
    const i64 old_position = rotation.old_positions[token], new_position = rotation.new_positions[token];
    const bool is_pair = column < rotation.num_pairs, turns = is_pair && old_position != new_position;
    Angle<Real> angle = {};
    if (turns) {
        const bool in_table = is_in_table(rotation, old_position) && is_in_table(rotation, new_position);
        if (in_table) angle = angle_at<Real, Table>(rotation, old_position, new_position, column);
        if (!in_table || !can_undo(angle.norm)) {
            atomicMin(rotation.bad_token, (u64)token);
            return;
        }
    }
    const i64 dim = is_pair ? column * rotation.pair_stride_dims : column + rotation.num_pairs;
    const i64 in_row = dim * (i64)sizeof(Key), partner = rotation.partner_stride_dims * (i64)sizeof(Key);
    const unsigned num_heads = (unsigned)rotation.num_heads;
    i64 in_plane = slot_offset_bytes(move, *item.plane, slot) + in_row;
    i64 head_stride = item.plane->head_stride_bytes;
    u64 target = item.plane->address + in_plane;
    item.chunk_address += row * item.token_stride_bytes + in_row;
    u64 source = item.chunk_address;
    unsigned head = 0, here;
    for (unsigned left = (unit.end_plane - unit.first_plane) * num_heads; left > 0; left -= here) {
        here = left < LMC_COLUMNS_IN_FLIGHT ? left : LMC_COLUMNS_IN_FLIGHT;
        Key x_key[LMC_COLUMNS_IN_FLIGHT], y_key[LMC_COLUMNS_IN_FLIGHT];
        u64 place[LMC_COLUMNS_IN_FLIGHT];
#pragma unroll
        for (unsigned u = 0; u < LMC_COLUMNS_IN_FLIGHT; ++u) {
            if (u >= here) continue;
            if (head == num_heads) {
                head = 0;
                to_next_layer(move, unit.tile, &item);
                if (!move.planes_alike) in_plane = slot_offset_bytes(move, *item.plane, slot) + in_row;
                head_stride = item.plane->head_stride_bytes;
                target = item.plane->address + in_plane;
                source = item.chunk_address;
            }
            x_key[u] = load_key<Key>(source);
            if (is_pair) y_key[u] = load_key<Key>(source + partner);
            place[u] = target;
            source += rotation.head_stride_bytes;
            target += head_stride;
            ++head;
        }
#pragma unroll
        for (unsigned u = 0; u < LMC_COLUMNS_IN_FLIGHT; ++u) {
            if (u >= here) continue;
            if (turns) {
                Real x = widened(x_key[u]), y = widened(y_key[u]);
                rerotate_pair(angle, &x, &y);
                round_to(x, &x_key[u]);
                round_to(y, &y_key[u]);
            }
            store_key(place[u], x_key[u]);
            if (is_pair) store_key(place[u] + partner, y_key[u]);
        }
    }
}

// The planes of the move are key planes.
template <typename Key, typename Table>
__device__ __forceinline__ void scatter_rotated(const Move& move, const Rotation& rotation) {
    const unsigned columns = (unsigned)(rotation.head_stride_bytes / (i64)sizeof(Key) - rotation.num_pairs);
    const unsigned units = num_units(move);
    for (unsigned unit_index = blockIdx.x; unit_index < units; unit_index += gridDim.x) {
        const Unit unit = unit_at(move, unit_index);
        const unsigned count = (unsigned)unit.tile.num_tokens * columns;
        for (unsigned index = threadIdx.x; index < count; index += blockDim.x) {
            const unsigned row = index / columns;
            scatter_column<Key, Table>(move, rotation, unit, row, index - row * columns);
        }
    }
}

// rotate_KEY_TABLE and scatter_rotated_KEY_TABLE, each of bfloat16, float16, float32, float64.
#define LMC_ROTATE(key_name, Key, table_name, Table)                                                              \
    extern "C" __global__ void __launch_bounds__(256) rotate_##key_name##_##table_name(Rotation rotation) {       \
        rotate_all<Key, Table>(rotation);                                                                         \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256, sizeof(Key) == 8 ? 2 : 4)                                   \
        scatter_rotated_##key_name##_##table_name(                                                                \
            const __grid_constant__ Batch batch, const __grid_constant__ Rotation rotation) {                     \
        scatter_rotated<Key, Table>(move_of(batch), rotation);                                                    \
    }
#define LMC_ROTATE_KEY(key_name, Key)                   \
    LMC_ROTATE(key_name, Key, bfloat16, BFloat16)       \
    LMC_ROTATE(key_name, Key, float16, Float16)         \
    LMC_ROTATE(key_name, Key, float32, float)           \
    LMC_ROTATE(key_name, Key, float64, double)

LMC_ROTATE_KEY(bfloat16, BFloat16)
LMC_ROTATE_KEY(float16, Float16)
LMC_ROTATE_KEY(float32, float)
LMC_ROTATE_KEY(float64, double)
