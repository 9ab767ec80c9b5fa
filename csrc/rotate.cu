// What: re-rotation of keys in place, one launch for all tokens, heads and pairs (arithmetic: rotate.h). Built by NVRTC;
//   tests run the same text on the host, thread by thread.
// Mapping: a thread takes one (token, pair) and rotates that pair in every head; neighbouring threads take neighbouring
//   pairs, then the next token.
// Why it is fast: cosines, sines and the norm are computed once for all heads; neighbouring threads touch neighbouring
//   dims; four heads are loaded before the first is stored. Tokens that do not move cost two loads.
// Bytes moved: 2 * moved tokens * NH * rotary_dim * element bytes, plus two rows of the table a token.
#include "rotate.h"

#define LMC_HEADS_IN_FLIGHT 4

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

// rotate_KEY_TABLE, each of bfloat16, float16, float32, float64.
#define LMC_ROTATE(key_name, Key, table_name, Table)                                                              \
    extern "C" __global__ void __launch_bounds__(256) rotate_##key_name##_##table_name(Rotation rotation) {       \
        rotate_all<Key, Table>(rotation);                                                                         \
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
