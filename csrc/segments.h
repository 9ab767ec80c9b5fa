// What: cuts chunks in host memory into segments of staging memory, and says which copies bring a segment there or back. The
//   specification is lmcache_fast/cuda/segments.py; here is the same in C++.
// Mapping: one host thread. Why it is fast: chunks of one kind are packed once; all memory is kept from call to call.
// Bytes moved: none here.
#pragma once
#include <algorithm>
#include <tuple>
#include <vector>

#include "batch.h"

namespace {

inline i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

struct Limits {
    i64 align_bytes, least_segment_bytes, segments_per_call, longest_pitch_bytes;
};

struct Part {
    u64 address;
    i64 strides[3], first_token, num_tokens;
};

// `height` runs of `width` bytes, each side with its own distance from one to the next; `packed` counts from the segment's
// start. seams: where in a single run one chunk ends and the next one begins.
struct Copy {
    u64 home;
    i64 packed, width, height, home_pitch, packed_pitch;
    std::vector<i64> seams;

    // Whether this copy can move one more run of bytes; then it does.
    bool joins(u64 next_home, i64 next_packed, i64 next_width, i64 longest_pitch) {
        if (height > 1) {
            if (next_width != width || next_home != home + height * home_pitch
                || next_packed != packed + height * packed_pitch) return false;
            ++height;
            return true;
        }
        const i64 from_home = (i64)(next_home - home), from_packed = next_packed - packed;
        if (from_home == width && from_packed == width) {
            seams.push_back(width);
            width += next_width;
            return true;
        }
        if (!seams.empty() || next_width != width || from_home < width || from_home > longest_pitch) return false;
        height = 2, home_pitch = from_home, packed_pitch = from_packed;
        return true;
    }
};

// How the rows of a part are packed and copied: `packing` of segments.py.
struct Packing {
    i64 strides[3], num_bytes, aligned_bytes, plane_bytes;
    i64 width, height, home_pitch, packed_pitch;  // of each copy
    struct Start { i64 home, packed; };
    std::vector<Start> starts;
};

// Parts of chunks that share one launch and one place in the ring, in some of the planes.
struct Segment {
    i64 first_plane, num_planes, num_tiles, end;
    std::vector<Part> parts;   // where they are at home
    std::vector<Chunk> rows;   // packed, addresses from the segment's start
    std::vector<Copy> copies;  // the first `num_copies` of them
    size_t num_copies;

    void begin(i64 first, i64 count) {
        first_plane = first, num_planes = count, num_tiles = end = 0, num_copies = 0;
        parts.clear();
        rows.clear();
    }

    void add_part(const Part& part, const Packing& packing, i64 address, i64 tile_tokens) {
        parts.push_back(part);
        rows.push_back({(u64)address, packing.strides[0], packing.strides[1], packing.strides[2], part.first_token,
                        part.num_tokens, num_tiles});
        num_tiles += ceil_div(part.num_tokens, tile_tokens);
    }

    void add_copy(u64 home, i64 packed, i64 width, i64 height, i64 home_pitch, i64 packed_pitch, i64 longest_pitch) {
        if (height == 1 && num_copies && copies[num_copies - 1].joins(home, packed, width, longest_pitch)) return;
        if (num_copies == copies.size()) copies.emplace_back();
        Copy& copy = copies[num_copies++];
        copy.home = home, copy.packed = packed, copy.width = width, copy.height = height;
        copy.home_pitch = home_pitch, copy.packed_pitch = packed_pitch;
        copy.seams.clear();
    }
};

void pack(Packing* into, const Move& move, const i64* home_strides, i64 num_tokens, i64 row_bytes, i64 align_bytes) {
    struct Axis { i64 stride, count; int number; };
    Axis axes[3] = {{home_strides[0], move.kv_size, 0}, {home_strides[1], move.num_layers, 1}, {home_strides[2], num_tokens, 2}};
    std::sort(axes, axes + 3, [](const Axis& a, const Axis& b) {
        return std::tie(a.stride, a.count, a.number) < std::tie(b.stride, b.count, b.number);
    });
    struct Level { i64 count, home, packed; } levels[3];  // innermost first
    int num_levels = 0, last_number = 3;
    bool in_order = true;
    i64 width = row_bytes, packed = row_bytes;
    std::fill(into->strides, into->strides + 3, 0);
    for (const Axis& axis : axes) {
        if (axis.count == 1) continue;
        in_order &= axis.number < last_number;
        last_number = axis.number;
        Level* last = num_levels ? levels + num_levels - 1 : nullptr;
        if (!last && axis.stride == width) width *= axis.count;
        else if (last && axis.stride == last->home * last->count) last->count *= axis.count;
        else levels[num_levels++] = {axis.count, axis.stride, packed};
        into->strides[axis.number] = packed;
        packed *= axis.count;
    }
    into->starts.assign(1, {0, 0});
    for (int level = 1; level < num_levels; ++level) {
        const std::vector<Packing::Start> inner = into->starts;
        into->starts.clear();
        for (i64 i = 0; i < levels[level].count; ++i)
            for (const Packing::Start& start : inner)
                into->starts.push_back({start.home + i * levels[level].home, start.packed + i * levels[level].packed});
    }
    into->width = width;
    into->height = num_levels ? levels[0].count : 1;
    into->home_pitch = num_levels ? levels[0].home : width;
    into->packed_pitch = num_levels ? levels[0].packed : width;
    into->num_bytes = packed;
    into->aligned_bytes = ceil_div(packed, align_bytes) * align_bytes;
    into->plane_bytes = num_levels == 0 && in_order ? num_tokens * row_bytes : 0;
}

// Segments, one after the other, each to `take` once it is whole. Memory is the caller's, kept from call to call.
template <typename Take> class Cutter {
public:
    Cutter(const Move& move, const Limits& limits, Segment* segment, Packing* packing, Take take)
        : move_(move), limits_(limits), segment_(*segment), packing_(*packing), take_(take) {}

    // `first_bytes`, `last_bytes`: where chunks are small enough or can be cut between planes, the first or the last segment is
    // no larger; 0: it may be as large as the others. Returns 0, or what `take` returned.
    i64 cut(const std::vector<Part>& parts, i64 whole, i64 first_bytes, i64 last_bytes) {
        const i64 planes = move_.num_planes, token_bytes = planes * row_bytes();
        i64 most = first_bytes ? std::min(first_bytes, whole) : whole, left = 0, failed = 0;  // left: bytes from this part on
        for (const Part& part : parts) left += part.num_tokens * token_bytes;
        const Part* packed = nullptr;  // most chunks of a call are alike
        segment_.begin(0, planes);
        for (const Part& part : parts) {
            if (!packed || part.num_tokens != packed->num_tokens || !std::equal(part.strides, part.strides + 3, packed->strides))
                pack(part);
            packed = &part;
            const bool ends = left <= last_bytes;  // the last segment begins here
            if (ends) last_bytes = 0;
            const bool at_end = last_bytes > 0 && left == part.num_tokens * token_bytes;  // or within this part
            left -= part.num_tokens * token_bytes;
            const i64 edge = at_end ? std::min(last_bytes, whole) : most;
            const bool cuts_planes = packing_.num_bytes > edge && 0 < packing_.plane_bytes && packing_.plane_bytes <= edge;
            const bool full = segment_.end + packing_.num_bytes > most || segment_.parts.size() == kChunksInBatch;
            if (!segment_.parts.empty() && (full || ends || cuts_planes)) {
                if ((failed = take_(segment_))) return failed;
                segment_.begin(0, planes);
                most = whole;
            }
            if (!cuts_planes && packing_.num_bytes <= whole) {
                add(part);
                continue;
            }
            if (cuts_planes) {
                failed = between_planes(part, edge / packing_.plane_bytes, whole / packing_.plane_bytes, at_end);
            } else {
                failed = between_tokens(part, whole / token_bytes);
                packed = nullptr;
            }
            if (failed) return failed;
            segment_.begin(0, planes);
            most = whole;
        }
        return segment_.parts.empty() ? 0 : take_(segment_);
    }

private:
    i64 row_bytes() const { return move_.pieces_per_token * move_.piece_bytes; }

    void pack(const Part& part) { ::pack(&packing_, move_, part.strides, part.num_tokens, row_bytes(), limits_.align_bytes); }

    void add(const Part& part) {
        const i64 offset = segment_.end;
        segment_.add_part(part, packing_, offset, move_.tile_tokens);
        segment_.end = offset + packing_.aligned_bytes;
        for (const Packing::Start& start : packing_.starts)
            segment_.add_copy(part.address + start.home, offset + start.packed, packing_.width, packing_.height,
                              packing_.home_pitch, packing_.packed_pitch, limits_.longest_pitch_bytes);
    }

    // Segments of at most `most` planes, even but for the first or the last one, of `edge` where that is less.
    i64 between_planes(const Part& part, i64 edge, i64 most, bool at_end) {
        const i64 planes = move_.num_planes, small = edge < most ? edge : 0, step = even(planes - small, most);
        const i64 evens_begin = at_end ? 0 : small, evens_end = evens_begin + planes - small;
        for (i64 plane = 0, count; plane < planes; plane += count) {
            count = plane < evens_begin || plane >= evens_end ? small : std::min(step, evens_end - plane);
            const i64 before = plane * packing_.plane_bytes;
            segment_.begin(plane, count);
            segment_.add_part(part, packing_, -before, move_.tile_tokens);  // where plane 0 would be
            segment_.add_copy(part.address + before, 0, count * packing_.plane_bytes, 1, 0, 0, 0);
            if (i64 failed = take_(segment_)) return failed;
        }
        return 0;
    }

    i64 between_tokens(const Part& part, i64 most) {
        const i64 step = even(part.num_tokens, most);
        for (i64 row = 0; row < part.num_tokens; row += step) {
            Part piece = part;
            piece.address += row * part.strides[2];
            piece.first_token += row;
            piece.num_tokens = std::min(step, part.num_tokens - row);
            segment_.begin(0, move_.num_planes);
            pack(piece);
            add(piece);
            if (i64 failed = take_(segment_)) return failed;
        }
        return 0;
    }

    // The size of parts, none larger than `most` (or 1), that are as few and as even as can be.
    static i64 even(i64 total, i64 most) { return ceil_div(total, ceil_div(total, std::max<i64>(1, most))); }

    const Move& move_;
    const Limits& limits_;
    Segment& segment_;
    Packing& packing_;
    Take take_;
};

}  // namespace
