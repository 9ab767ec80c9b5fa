// What: the move and the re-rotation on the host: the address model and the arithmetic of address.h and rotate.h, compiled
//   with OpenMP and called through ctypes. The entry points are at the end.
// Mapping: each thread takes one run of consecutive items, so it walks a chunk's memory from front to back.
// Why it is fast: one call moves all chunks, layers and heads; no temporary exists. Large batches are written with
//   streaming stores, whole cache lines at a time: a line that will be overwritten is not read first, and what the
//   engine has in its caches stays there.
// Bytes moved: each row is read once and written once; without streaming stores most machines read the target, too.
#include <cstring>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "address.h"
#include "rotate.h"

namespace {

// ---------------------------------------------------------------------------------------------- the move

constexpr i64 kLineBytes = 64;

#if defined(__AVX512F__)
void stream_line(char* target, const char* source) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
}
#elif defined(__AVX__)
void stream_line(char* target, const char* source) {
    for (int part = 0; part < kLineBytes; part += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + part),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + part)));
}
#elif defined(__SSE2__)
void stream_line(char* target, const char* source) {
    for (int part = 0; part < kLineBytes; part += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + part),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + part)));
}
#else
void stream_line(char* target, const char* source) { std::memcpy(target, source, kLineBytes); }
#endif

// Streaming stores are weakly ordered; this orders them before whatever the thread signals next.
void end_streaming() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

void copy_row(char* target, const char* source, i64 bytes, bool stream) {
    if (stream && (reinterpret_cast<u64>(target) | bytes) % kLineBytes == 0)
        for (i64 done = 0; done < bytes; done += kLineBytes) stream_line(target + done, source + done);
    else
        std::memcpy(target, source, bytes);
}

// The CPU does not foresee in which page of the engine's memory a row lies. It is told some rows before, by the row's first
// bytes; the rest of the page it foresees.
void announce_row(const Move& move, const Item& item, i64 row) {
    constexpr i64 kBytes = 4 * kLineBytes;
    i64 bad_token;
    const Row found = row_at(move, item, row, &bad_token);
    if (!found.moves) return;
    for (i64 done = 0; done < kBytes; done += kLineBytes)
        __builtin_prefetch(reinterpret_cast<const char*>(found.plane_address + done));
}

// Rows that follow each other on both sides, as those of one block often do, are moved as one.
void move_item(const Move& move, const Item& item, bool scatter, bool stream) {
    const i64 rows = item.num_tokens * move.pieces_per_token;
    u64 plane = 0, chunk = 0;
    i64 bytes = 0;
    for (i64 row = 0; row <= rows; ++row) {
        i64 bad_token;
        Row found = {0, 0, false};
        if (row < rows) found = row_at(move, item, row, &bad_token);
        if (found.moves && found.plane_address == plane + bytes && found.chunk_address == chunk + bytes) {
            bytes += move.piece_bytes;
            continue;
        }
        if (row + move.block_size < rows) announce_row(move, item, row + move.block_size);
        char* page = reinterpret_cast<char*>(plane);
        char* home = reinterpret_cast<char*>(chunk);
        if (bytes > 0) scatter ? copy_row(page, home, bytes, stream) : copy_row(home, page, bytes, stream);
        plane = found.plane_address;
        chunk = found.chunk_address;
        bytes = found.moves ? move.piece_bytes : 0;
    }
}

// The first token, in the order of the chunks, whose id is out of range; -1 if there is none.
i64 first_bad_token(const Move& move) {
    for (i64 c = 0; c < move.num_chunks; ++c) {
        const Chunk& chunk = move.chunks[c];
        const i64 first = chunk.first_token / move.tokens_per_id;
        const i64 last = (chunk.first_token + chunk.num_tokens - 1) / move.tokens_per_id;
        i64 greatest = -1;
        for (i64 index = first; index <= last; ++index)
            greatest = move.ids[index] > greatest ? move.ids[index] : greatest;
        if (greatest < move.num_ids) continue;
        for (i64 row = 0; row < chunk.num_tokens; ++row)
            if (slot_of(move, chunk.first_token + row) == kBadId) return chunk.first_token + row;
    }
    return -1;
}

// ---------------------------------------------------------------------------------------------- the re-rotation

constexpr i64 kPairs = 64;  // pairs whose angles are in hand at once

template <typename Real> struct Angles {
    Real old_cos[kPairs], old_sin[kPairs], new_cos[kPairs], new_sin[kPairs], norm[kPairs];
};

template <typename Real, typename Table>
void load_angles(const Rotation& rotation, i64 token, i64 first_pair, i64 pairs, Angles<Real>* angles) {
    for (i64 i = 0; i < pairs; ++i) {
        const Angle<Real> angle = angle_at<Real, Table>(rotation, rotation.old_positions[token],
                                                        rotation.new_positions[token], first_pair + i);
        angles->old_cos[i] = angle.old_cos;
        angles->old_sin[i] = angle.old_sin;
        angles->new_cos[i] = angle.new_cos;
        angles->new_sin[i] = angle.new_sin;
        angles->norm[i] = angle.norm;
    }
}

// One head. kStride > 0 is the byte distance of neighbouring pairs, known to the compiler: then the loops are vectors.
template <typename Key, i64 kStride>
void rotate_head(const Rotation& rotation, u64 x_address, i64 pairs, const Angles<typename RealOf<Key>::type>& angles) {
    typedef typename RealOf<Key>::type Real;
    const i64 stride = kStride ? kStride : rotation.pair_stride_dims * rotation.dim_stride_bytes;
    const u64 y_address = x_address + rotation.partner_stride_dims * rotation.dim_stride_bytes;
    Real x[kPairs], y[kPairs];
    for (i64 i = 0; i < pairs; ++i) x[i] = widened(*reinterpret_cast<const Key*>(x_address + i * stride));
    for (i64 i = 0; i < pairs; ++i) y[i] = widened(*reinterpret_cast<const Key*>(y_address + i * stride));
    for (i64 i = 0; i < pairs; ++i) {
        const Angle<Real> angle = {angles.old_cos[i], angles.old_sin[i], angles.new_cos[i], angles.new_sin[i], angles.norm[i]};
        rerotate_pair(angle, x + i, y + i);
    }
    for (i64 i = 0; i < pairs; ++i) round_to(x[i], reinterpret_cast<Key*>(x_address + i * stride));
    for (i64 i = 0; i < pairs; ++i) round_to(y[i], reinterpret_cast<Key*>(y_address + i * stride));
}

// All heads of a token's keys at `keys_address`.
template <typename Key, typename Table> void rotate_heads(const Rotation& rotation, i64 token, u64 keys_address) {
    typedef typename RealOf<Key>::type Real;
    constexpr i64 kSize = sizeof(Key);
    const i64 stride = rotation.pair_stride_dims * rotation.dim_stride_bytes;
    const auto rotate = stride == kSize       ? rotate_head<Key, kSize>
                        : stride == 2 * kSize ? rotate_head<Key, 2 * kSize>
                                              : rotate_head<Key, 0>;
    for (i64 first = 0; first < rotation.num_pairs; first += kPairs) {
        const i64 left = rotation.num_pairs - first, pairs = left < kPairs ? left : kPairs;
        Angles<Real> angles;
        load_angles<Real, Table>(rotation, token, first, pairs, &angles);
        u64 address = keys_address + first * stride;
        for (i64 head = 0; head < rotation.num_heads; ++head, address += rotation.head_stride_bytes)
            rotate(rotation, address, pairs, angles);
    }
}

template <typename Key, typename Table> void rotate_token(const Rotation& rotation, i64 token) {
    rotate_heads<Key, Table>(rotation, token, rotation.keys_address + token * rotation.token_stride_bytes);
}

template <typename Key, typename Table> bool can_rotate_token(const Rotation& rotation, i64 token) {
    typedef typename RealOf<Key>::type Real;
    const i64 old_position = rotation.old_positions[token], new_position = rotation.new_positions[token];
    if (!is_in_table(rotation, old_position) || !is_in_table(rotation, new_position)) return false;
    bool good = true;
    if (old_position != new_position)
        for (i64 pair = 0; pair < rotation.num_pairs; ++pair)
            good &= can_undo(angle_at<Real, Table>(rotation, old_position, new_position, pair).norm);
    return good;
}

// -1, or the first token that cannot be moved: then nothing was written.
template <typename Key, typename Table> i64 rotate_all(const Rotation& rotation, int threads) {
    i64 bad_token = rotation.num_tokens;
#pragma omp parallel for num_threads(threads) reduction(min : bad_token)
    for (i64 token = 0; token < rotation.num_tokens; ++token)
        if (!can_rotate_token<Key, Table>(rotation, token)) bad_token = token < bad_token ? token : bad_token;
    if (bad_token < rotation.num_tokens) return bad_token;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 16)
    for (i64 token = 0; token < rotation.num_tokens; ++token)
        if (rotation.old_positions[token] != rotation.new_positions[token]) rotate_token<Key, Table>(rotation, token);
    return -1;
}

// On the way: the keys of an item go to their pages by way of `token_keys`, where those of one token have room.
template <typename Key, typename Table>
void scatter_rotated(const Move& move, const Rotation& rotation, const Item& item, bool stream, char* token_keys) {
    const i64 pieces = move.pieces_per_token;
    for (i64 row = 0; row < item.num_tokens; ++row) {
        i64 bad_token;
        const Row found = row_at(move, item, row * pieces, &bad_token);
        if (!found.moves) continue;
        const i64 token = item.first_token + row;
        const char* keys = reinterpret_cast<const char*>(found.chunk_address);
        if (rotation.old_positions[token] != rotation.new_positions[token]) {
            std::memcpy(token_keys, keys, pieces * move.piece_bytes);
            rotate_heads<Key, Table>(rotation, token, reinterpret_cast<u64>(token_keys));
            keys = token_keys;
        }
        char* page = reinterpret_cast<char*>(found.plane_address);
        for (i64 piece = 0; piece < pieces; ++piece)
            copy_row(page + piece * item.plane->head_stride_bytes, keys + piece * move.piece_bytes, move.piece_bytes, stream);
    }
}

typedef i64 (*RotateAll)(const Rotation&, int);
typedef void (*ScatterRotated)(const Move&, const Rotation&, const Item&, bool, char*);

#define LMC_OF_KEY(f, Key) {f<Key, BFloat16>, f<Key, Float16>, f<Key, float>, f<Key, double>}
#define LMC_OF_ALL(f) {LMC_OF_KEY(f, BFloat16), LMC_OF_KEY(f, Float16), LMC_OF_KEY(f, float), LMC_OF_KEY(f, double)}
constexpr RotateAll kRotateAll[4][4] = LMC_OF_ALL(rotate_all);
constexpr ScatterRotated kScatterRotated[4][4] = LMC_OF_ALL(scatter_rotated);

}  // namespace

// Moves one batch. Returns -1, or the first token whose id is out of range: then
// nothing was moved.
extern "C" i64 lmcache_fast_move(const Move* move, int scatter, int stream, int threads) {
    const i64 bad_token = first_bad_token(*move);
    if (bad_token >= 0) return bad_token;
    const i64 items = num_items(*move);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (i64 index = 0; index < items; ++index) move_item(*move, item_at(*move, index), scatter, stream);
        if (stream) end_streaming();
    }
    return -1;
}

// Scatters one batch whose keys, plane 0 of each layer, are rotated on the way; positions were checked. Types as below,
// result as above.
extern "C" i64 lmcache_fast_scatter_rotated(const Move* move, const Rotation* rotation, int key_type, int table_type,
                                            int stream, int threads) {
    const i64 bad_token = first_bad_token(*move);
    if (bad_token >= 0) return bad_token;
    const ScatterRotated scatter_keys = kScatterRotated[key_type][table_type];
    const i64 items = num_items(*move);
#pragma omp parallel num_threads(threads)
    {
        std::vector<char> token_keys(move->pieces_per_token * move->piece_bytes);
#pragma omp for schedule(dynamic)
        for (i64 index = 0; index < items; ++index) {
            const Item item = item_at(*move, index);
            if ((item.plane - move->planes) % move->kv_size == 0)
                scatter_keys(*move, *rotation, item, stream, token_keys.data());
            else
                move_item(*move, item, true, stream);
        }
        if (stream) end_streaming();
    }
    return -1;
}

// Rotates keys in place. Types are 0 bfloat16, 1 float16, 2 float32, 3 float64. Returns -1, or the first token whose
// position is outside the table or cannot be undone: then nothing was written.
extern "C" i64 lmcache_fast_rotate(const Rotation* rotation, int key_type, int table_type, int threads) {
    return kRotateAll[key_type][table_type](*rotation, threads);
}
