// What: the steps of one call of the backend `cuda` on the host: look at the slots, cut chunks into segments, describe each
//   batch, launch and copy. lmcache_fast/cuda/steps.py and segments.py are the specification: the same verbs, in the same
//   order, with the same arguments. Verbs are a table of functions: those of a GPU (driver.h), or of a simulated device.
// Mapping: one host thread.
// Why it is fast: between two verbs stand some hundred instructions, and memory is kept from call to call. What is left of a
//   call is the driver's own time: 2 calls a segment, and some 6 more.
// Bytes moved: slots, 8 bytes each, to page-locked memory and on to the device; few travel with the launches.
#include <algorithm>
#include <numeric>
#include <vector>

#include "driver.h"
#include "rotate.h"
#include "segments.h"

namespace {

// ---------------------------------------------------------------------------------------------- what Python hands over

enum : int { kPlaces = 2, kWidths = 5, kFlagWords = 2 };

// One direction on one device.
struct Lane {
    const Verbs* verbs;
    i64 stores;
    u64 kernels[kWidths];       // by the logarithm of the vector width
    u64 keep_kernels[kWidths];
    u64 event;                  // for waits inside a call
    u64 bringing;               // stream
    i64 staged_blocks, zero_copy_blocks, most_blocks, resident_blocks, planes_per_unit, slots_in_batch;
    Limits limits;
};

// A chunk in memory: its rows are the request's tokens [start, end).
struct Span {
    u64 address;
    i64 strides[3];  // kv, layer, token, in bytes
    i64 start, end;
};

struct Place {
    u64 address, stream;
};

struct Call {
    const Move* move;           // all of a batch that does not change from call to call
    const Span* spans;
    i64 num_spans, skip_prefix;
    i64 granule_bytes;          // of the planes
    const i64* slots;
    i64 num_slots, slots_on_device, checked, in_use;
    u64 pinned, near;           // the block of descriptors
    i64 words_before;           // in it, flags included
    u64 current;                // stream
    Place places[kPlaces];
    i64 place_bytes;            // 0: chunks are in device memory
    i64 turn;                   // in and out
    i64 zero_copy_bytes;
    u64 rotated_kernel;         // 0: none
    const Rotation* rotation;
    i64 key_bytes;              // of one element
    i64 kept;                   // the event behind which the slots are in the block on the device; -1: not yet there
    i64 idle;                   // no other call of this direction is under way
    u64 ready, ends[kPlaces];   // events
    // out:
    i64 num_ends, reports, pageable, width;
    i64 brought;                // this call has brought its block to the device, which is there behind `ready`
    u64 slots_address;
};

enum : i64 { kDone = 0, kNothing = 1, kBadSlot = 2, kNarrow = 3 };

// ---------------------------------------------------------------------------------------------- the steps

class Steps {
public:
    Steps(const Lane& lane, Call& call) : lane_(lane), call_(call), verbs_(*lane.verbs) {}

    i64 run() {
        find_parts();
        if (parts().empty()) return kNothing;
        if (!look_at_slots()) return kBadSlot;
        if (!call_.place_bytes) return direct(call_.current, lane_.most_blocks);
        if (num_bytes() <= call_.zero_copy_bytes && all_mapped(parts(), &scratch().homes)) {
            parts() = scratch().homes;
            return direct(call_.places[0].stream, lane_.zero_copy_blocks);
        }
        return staged();
    }

private:
    // What keeps its memory from call to call; calls of a thread come one after the other.
    struct Scratch {
        std::vector<Part> parts, homes;
        std::vector<Chunk> rows;
        Packing packing;
        Segment segment;
        BatchAndSlots launch;
        Homes home_rows;
    };
    static Scratch& scratch() { static thread_local Scratch memory; return memory; }
    static std::vector<Part>& parts() { return scratch().parts; }
    inline static const std::vector<Chunk> none;  // no table of chunks

    const Lane& lane_;
    Call& call_;
    const Verbs& verbs_;
    i64 num_tokens_ = 0;
    bool may_skip_ = false, reports_ = false, entered_ = false;
    i64 brought_ = -1;      // an event, or none
    u64 streams_[kPlaces];  // of a staged call
    int num_streams_ = 0;

    i64 row_bytes() const { return call_.move->pieces_per_token * call_.move->piece_bytes; }

    void find_parts() {
        parts().clear();
        for (const Span* span = call_.spans; span < call_.spans + call_.num_spans; ++span) {
            const i64 first = std::max(span->start, call_.skip_prefix);
            if (first >= span->end) continue;
            Part part = {span->address + (first - span->start) * span->strides[2], {}, first, span->end - first};
            std::copy(span->strides, span->strides + 3, part.strides);
            parts().push_back(part);
            num_tokens_ += part.num_tokens;
        }
    }

    bool look_at_slots() {
        if (call_.in_use) return true;
        if (call_.slots_on_device) {
            may_skip_ = true, reports_ = !call_.checked;
            return true;
        }
        i64 least = 0, most = 0;
        for (const Part& part : parts())
            for (i64 token = part.first_token; token < part.first_token + part.num_tokens; ++token) {
                least = std::min(least, call_.slots[token]);
                most = std::max(most, call_.slots[token]);
            }
        may_skip_ = least < 0;
        return most < call_.move->num_ids;
    }

    i64 num_bytes() const { return num_tokens_ * call_.move->num_planes * row_bytes(); }

    i64 segment_bytes() const {
        const i64 share = ceil_div(num_bytes(), lane_.limits.segments_per_call);
        return call_.idle ? std::min(call_.place_bytes, std::max(lane_.limits.least_segment_bytes, share)) : call_.place_bytes;
    }

    // Addresses that kernels have for the chunks; false if some are out of reach.
    bool all_mapped(const std::vector<Part>& found, std::vector<Part>* mapped) {
        mapped->clear();
        for (Part part : found) {
            part.address = verbs_.mapped(verbs_.device, part.address);
            if (!part.address) return false;
            mapped->push_back(part);
        }
        return true;
    }

    // ------------------------------------------------------------------------------------------ descriptors

    void describe_rows(const std::vector<Part>& found, std::vector<Chunk>* rows, i64* num_tiles) {
        rows->clear();
        *num_tiles = 0;
        for (const Part& part : found) {
            rows->push_back({part.address, part.strides[0], part.strides[1], part.strides[2], part.first_token,
                             part.num_tokens, *num_tiles});
            *num_tiles += ceil_div(part.num_tokens, call_.move->tile_tokens);
        }
    }

    i64 widest() const { return std::gcd<i64, i64>(16, call_.granule_bytes); }

    static i64 granule(const std::vector<Part>& found) {
        i64 granule = 0;
        for (const Part& part : found) {
            granule = std::gcd(granule, (i64)part.address);
            for (i64 stride : part.strides) granule = std::gcd(granule, stride);
        }
        return granule;
    }

    // Few slots travel with the launch, unless other kernels need them too.
    i64 describe(i64 width, const std::vector<Chunk>& table, bool keeps) {
        call_.width = width;
        if (call_.rotated_kernel && width % call_.key_bytes) return kNarrow;
        const i64 chunks_at = call_.words_before * sizeof(i64), slots_at = chunks_at + (i64)(table.size() * sizeof(Chunk));
        const bool travels = table.empty() && !keeps && !call_.rotated_kernel && !call_.slots_on_device
                          && call_.num_slots <= lane_.slots_in_batch;
        if (!travels) brought_ = call_.kept;
        const i64 failed = travels || call_.kept >= 0 ? 0 : bring(table, chunks_at, slots_at);
        BatchAndSlots& launch = scratch().launch;
        call_.slots_address = travels ? 0 : call_.near + slots_at;
        launch.batch.move = *call_.move;
        launch.batch.move.ids = (const i64*)call_.slots_address;
        launch.batch.move.bad_token = (u64*)call_.near;
        if (travels) std::copy(call_.slots, call_.slots + call_.num_slots, launch.slots);
        return failed;
    }

    // What is in the block behind the flags, and the slots behind it.
    i64 bring(const std::vector<Chunk>& table, i64 chunks_at, i64 slots_at) {
        const i64 begin = kFlagWords * sizeof(i64), slots_bytes = call_.num_slots * sizeof(i64);
        i64 failed = 0, end = slots_at;
        if (!table.empty())
            failed = verbs_.write(verbs_.device, call_.pinned + chunks_at, (u64)table.data(), table.size() * sizeof(Chunk));
        if (failed) return failed;
        if (call_.slots_on_device) {
            failed = verbs_.copy(verbs_.device, call_.near + end, (u64)call_.slots, slots_bytes, call_.current);
        } else {
            failed = verbs_.write(verbs_.device, call_.pinned + end, (u64)call_.slots, slots_bytes);
            end += slots_bytes;
        }
        if (failed || end == begin) return failed;
        failed = verbs_.copy(verbs_.device, call_.near + begin, call_.pinned + begin, end - begin, lane_.bringing);
        if (failed) return failed;
        brought_ = call_.ready, call_.brought = 1;
        return verbs_.record(verbs_.device, call_.ready, lane_.bringing);
    }

    // `stream` goes on behind what `other` was given so far; again: when that was last asked.
    i64 follow(u64 stream, u64 other, bool again = false) {
        const i64 failed = again ? 0 : verbs_.record(verbs_.device, lane_.event, other);
        return failed ? failed : verbs_.wait(verbs_.device, stream, lane_.event);
    }

    // `stream` goes on behind all that the current stream was given, and finds the block.
    i64 enter(u64 stream) {
        const i64 failed = stream == call_.current ? 0 : follow(stream, call_.current, entered_);
        entered_ |= stream != call_.current;
        return failed || brought_ < 0 ? failed : verbs_.wait(verbs_.device, stream, brought_);
    }

    i64 fetch_flag(u64 stream) { return verbs_.copy(verbs_.device, call_.pinned, call_.near, sizeof(i64), stream); }
    static int logarithm(i64 width) { return __builtin_ctzll((u64)width); }

    void point(const std::vector<Chunk>* rows, u64 table, i64 num_chunks, i64 num_tiles) {
        Batch& batch = scratch().launch.batch;
        batch.move.num_chunks = num_chunks, batch.move.num_tiles = num_tiles, batch.move.chunks = (const Chunk*)table;
        if (rows) std::copy(rows->begin(), rows->end(), batch.chunks);
    }

    i64 launch(u64 stream, i64 most_blocks) {
        Batch& batch = scratch().launch.batch;
        Move& move = batch.move;
        const i64 wanted_units = std::min(most_blocks, lane_.resident_blocks);
        move.planes_per_unit = std::min(lane_.planes_per_unit, ceil_div(move.num_tiles * move.num_planes, wanted_units));
        const i64 num_blocks = std::min(most_blocks, move.num_tiles * ceil_div(move.num_planes, move.planes_per_unit));
        void* plain[] = {&scratch().launch};
        const u64 kernel = lane_.kernels[logarithm(call_.width)];
        if (!call_.rotated_kernel) return verbs_.launch(verbs_.device, kernel, stream, plain, num_blocks);
        const i64 first = move.first_plane, end = first + move.num_planes;
        if (first < move.num_layers) {
            void* rotated[] = {&batch, (void*)call_.rotation};
            move.num_planes = std::min(end, move.num_layers) - first;
            const i64 failed = verbs_.launch(verbs_.device, call_.rotated_kernel, stream, rotated, num_blocks);
            if (failed) return failed;
        }
        if (end <= move.num_layers) return 0;
        move.first_plane = std::max(first, move.num_layers);
        move.num_planes = end - move.first_plane;
        return verbs_.launch(verbs_.device, kernel, stream, plain, num_blocks);
    }

    // ------------------------------------------------------------------------------------------ one launch

    i64 direct(u64 stream, i64 most_blocks) {
        std::vector<Chunk>& rows = scratch().rows;
        i64 num_tiles;
        describe_rows(parts(), &rows, &num_tiles);
        const bool travels = rows.size() <= kChunksInBatch;
        i64 failed = describe(std::gcd(widest(), granule(parts())), travels ? none : rows, false);
        if (!failed) failed = enter(stream);
        if (failed) return failed;
        point(travels ? &rows : nullptr, travels ? 0 : call_.near + call_.words_before * sizeof(i64), rows.size(), num_tiles);
        failed = launch(stream, most_blocks);
        if (!failed && reports_) failed = fetch_flag(stream);
        call_.reports = reports_, call_.num_ends = 1;
        return failed ? failed : verbs_.record(verbs_.device, call_.ends[0], stream);
    }

    // ------------------------------------------------------------------------------------------ through the ring

    i64 staged() {
        i64 failed = describe(widest(), none, lane_.stores && may_skip_);
        if (failed) return failed;
        auto taken = [this](const Segment& segment) { return take(segment); };
        Cutter<decltype(taken)> cutter(*call_.move, lane_.limits, &scratch().segment, &scratch().packing, taken);
        const i64 small = call_.idle ? lane_.limits.least_segment_bytes : 0;
        failed = cutter.cut(parts(), segment_bytes(), lane_.stores ? small : 0, lane_.stores ? 0 : small);
        if (failed) return failed;
        call_.pageable = call_.idle && !verbs_.mapped(verbs_.device, parts().front().address);
        call_.reports = reports_;
        if (!reports_) {
            for (int i = 0; i < num_streams_ && !failed; ++i)
                failed = verbs_.record(verbs_.device, call_.ends[call_.num_ends++], streams_[i]);
            return failed;
        }
        const u64 last = streams_[0];
        for (int i = 1; i < num_streams_ && !failed; ++i) failed = follow(last, streams_[i]);
        if (!failed) failed = fetch_flag(last);
        call_.num_ends = 1;
        return failed ? failed : verbs_.record(verbs_.device, call_.ends[0], last);
    }

    // The segment goes its way, on the stream of the next place.
    i64 take(const Segment& segment) {
        const Place& place = call_.places[call_.turn++ % kPlaces];
        i64 failed = 0;
        if (std::find(streams_, streams_ + num_streams_, place.stream) == streams_ + num_streams_) {
            failed = enter(place.stream);
            streams_[num_streams_++] = place.stream;
        }
        if (!failed && !lane_.stores) failed = copy(segment, place, false);
        point(&segment.rows, 0, segment.parts.size(), segment.num_tiles);
        Move& move = scratch().launch.batch.move;
        move.base_address = place.address, move.first_plane = segment.first_plane, move.num_planes = segment.num_planes;
        if (!failed && lane_.stores && may_skip_) failed = keep(segment, place);
        if (!failed) failed = launch(place.stream, lane_.staged_blocks);
        if (!failed && lane_.stores) failed = copy(segment, place, true);
        return failed;
    }

    i64 keep(const Segment& segment, const Place& place) {
        std::vector<Part>& homes = scratch().homes;
        if (!all_mapped(segment.parts, &homes)) return copy(segment, place, false);
        i64 num_tiles;
        describe_rows(homes, &scratch().rows, &num_tiles);
        std::copy(scratch().rows.begin(), scratch().rows.end(), scratch().home_rows.chunks);
        const i64 width = std::gcd(widest(), granule(homes));
        void* arguments[] = {&scratch().launch, &scratch().home_rows};
        return verbs_.launch(verbs_.device, lane_.keep_kernels[logarithm(width)], place.stream, arguments, lane_.staged_blocks);
    }

    i64 copy(const Segment& segment, const Place& place, bool to_home) {
        for (size_t i = 0; i < segment.num_copies; ++i) {
            const Copy& copy = segment.copies[i];
            const u64 near = place.address + copy.packed;
            const u64 target = to_home ? copy.home : near, source = to_home ? near : copy.home;
            const i64 failed = copy.height == 1 ? copy_run(target, source, copy, place.stream)
                                                : copy_rows(target, source, copy, place.stream, to_home);
            if (failed) return failed;
        }
        return 0;
    }

    // CUDA refuses a copy across two allocations; then it is made part by part.
    i64 copy_run(u64 target, u64 source, const Copy& copy, u64 stream) {
        i64 failed = verbs_.copy(verbs_.device, target, source, copy.width, stream);
        if (!failed || copy.seams.empty()) return failed;
        for (size_t i = 0; i <= copy.seams.size(); ++i) {
            const i64 begin = i ? copy.seams[i - 1] : 0, end = i < copy.seams.size() ? copy.seams[i] : copy.width;
            if ((failed = verbs_.copy(verbs_.device, target + begin, source + begin, end - begin, stream))) return failed;
        }
        return 0;
    }

    i64 copy_rows(u64 target, u64 source, const Copy& copy, u64 stream, bool to_home) {
        const i64 target_pitch = to_home ? copy.home_pitch : copy.packed_pitch;
        const i64 source_pitch = to_home ? copy.packed_pitch : copy.home_pitch;
        i64 failed = verbs_.copy_rows(verbs_.device, target, target_pitch, source, source_pitch, copy.width, copy.height,
                                      stream, to_home);
        if (!failed) return 0;
        for (i64 row = 0; row < copy.height; ++row) {
            failed = verbs_.copy(verbs_.device, target + row * target_pitch, source + row * source_pitch, copy.width, stream);
            if (failed) return failed;
        }
        return 0;
    }
};

}  // namespace

extern "C" {

// The verbs of the device whose context is current; `threads` a block. nullptr without a driver. Never freed.
const void* lmcache_fast_driver_verbs(i64 threads) { return driver_verbs(threads); }

// How many words a Lane and a Call have, for who describes them elsewhere.
void lmcache_fast_steps_words(i64* words) { words[0] = sizeof(Lane) / sizeof(i64), words[1] = sizeof(Call) / sizeof(i64); }

// One call. Returns kDone, kNothing, kBadSlot or kNarrow (then nothing was queued), or below 0 what a verb returned.
i64 lmcache_fast_steps(const void* lane, void* call) { return Steps(*(const Lane*)lane, *(Call*)call).run(); }

// The same on a GPU, whose context is made current meanwhile.
i64 lmcache_fast_steps_on_gpu(const void* lane, void* call) {
    const Driver& driver = driver_of(((const Lane*)lane)->verbs->device);
    void* current = nullptr;
    if (int failed = driver.context_current(&current)) return -failed;
    const bool other = current != driver.context;
    if (other)
        if (int failed = driver.context_push(driver.context)) return -failed;
    const i64 status = lmcache_fast_steps(lane, call);
    if (other) driver.context_pop(&current);
    return status;
}

}  // extern "C"
