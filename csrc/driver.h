// What: the verbs of steps.cpp as calls of the CUDA driver, found at run time: no header and no library of CUDA is needed to
//   compile. Contexts, streams, events and functions are the driver's handles.
// Mapping: none. Why it is fast: a verb is one call through a pointer; the context is looked at once a call of steps.cpp.
// Bytes moved: what each verb is asked for.
#pragma once
#include <dlfcn.h>

#include <cstring>

#include "address.h"

namespace {

// Each returns 0, or why not; `mapped` an address, or 0.
struct Verbs {
    void* device;
    i64 (*write)(void* device, u64 target, u64 source, i64 bytes);
    i64 (*copy)(void* device, u64 target, u64 source, i64 bytes, u64 stream);
    i64 (*copy_rows)(void* device, u64 target, i64 target_pitch, u64 source, i64 source_pitch, i64 width, i64 height,
                     u64 stream, i64 to_home);
    i64 (*launch)(void* device, u64 kernel, u64 stream, void** arguments, i64 num_blocks);
    i64 (*record)(void* device, u64 event, u64 stream);
    i64 (*wait)(void* device, u64 stream, u64 event);
    u64 (*mapped)(void* device, u64 address);
};

struct Driver {
    int (*context_current)(void**);
    int (*context_push)(void*);
    int (*context_pop)(void**);
    int (*memcpy_async)(u64, u64, size_t, void*);
    int (*memcpy_2d_async)(const void*, void*);
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    int (*event_record)(void*, void*);
    int (*stream_wait)(void*, void*, unsigned);
    int (*pointer_attribute)(void*, int, u64);
    void* context;
    i64 threads;
};

// CUDA_MEMCPY2D of cuda.h.
struct Rows {
    size_t source_x, source_y;
    int source_type;
    const void* source_host;
    u64 source_device;
    void* source_array;
    size_t source_pitch;
    size_t target_x, target_y;
    int target_type;
    void* target_host;
    u64 target_device;
    void* target_array;
    size_t target_pitch;
    size_t width, height;
};
enum : int { kHostMemory = 1, kDeviceMemory = 2, kDevicePointerAttribute = 3 };

Driver& driver_of(void* device) { return *(Driver*)device; }

i64 driver_write(void*, u64 target, u64 source, i64 bytes) {
    std::memcpy((void*)target, (const void*)source, bytes);
    return 0;
}
i64 driver_copy(void* device, u64 target, u64 source, i64 bytes, u64 stream) {
    return -driver_of(device).memcpy_async(target, source, bytes, (void*)stream);
}
i64 driver_copy_rows(void* device, u64 target, i64 target_pitch, u64 source, i64 source_pitch, i64 width, i64 height,
                     u64 stream, i64 to_home) {
    Rows rows = {};
    rows.source_type = to_home ? kDeviceMemory : kHostMemory;
    rows.target_type = to_home ? kHostMemory : kDeviceMemory;
    if (to_home) rows.source_device = source, rows.target_host = (void*)target;
    else rows.source_host = (const void*)source, rows.target_device = target;
    rows.source_pitch = source_pitch, rows.target_pitch = target_pitch;
    rows.width = width, rows.height = height;
    return -driver_of(device).memcpy_2d_async(&rows, (void*)stream);
}
i64 driver_launch(void* device, u64 kernel, u64 stream, void** arguments, i64 num_blocks) {
    const Driver& driver = driver_of(device);
    return -driver.launch((void*)kernel, num_blocks, 1, 1, driver.threads, 1, 1, 0, (void*)stream, arguments, nullptr);
}
i64 driver_record(void* device, u64 event, u64 stream) { return -driver_of(device).event_record((void*)event, (void*)stream); }
i64 driver_wait(void* device, u64 stream, u64 event) { return -driver_of(device).stream_wait((void*)stream, (void*)event, 0); }
u64 driver_mapped(void* device, u64 address) {
    u64 found = 0;
    return driver_of(device).pointer_attribute(&found, kDevicePointerAttribute, address) ? 0 : found;
}

// The verbs of the device whose context is current; `threads` a block. nullptr without a driver. Never freed.
const Verbs* driver_verbs(i64 threads) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return nullptr;
    Driver* driver = new Driver();
    const struct { void* place; const char* name; } functions[] = {
        {&driver->context_current, "cuCtxGetCurrent"},       {&driver->context_push, "cuCtxPushCurrent_v2"},
        {&driver->context_pop, "cuCtxPopCurrent_v2"},        {&driver->memcpy_async, "cuMemcpyAsync"},
        {&driver->memcpy_2d_async, "cuMemcpy2DAsync_v2"},    {&driver->launch, "cuLaunchKernel"},
        {&driver->event_record, "cuEventRecord"},            {&driver->stream_wait, "cuStreamWaitEvent"},
        {&driver->pointer_attribute, "cuPointerGetAttribute"},
    };
    for (const auto& function : functions) {
        void* found = dlsym(library, function.name);
        if (!found) return nullptr;
        std::memcpy(function.place, &found, sizeof found);
    }
    if (driver->context_current(&driver->context) || !driver->context) return nullptr;
    driver->threads = threads;
    return new Verbs{driver, driver_write, driver_copy, driver_copy_rows, driver_launch, driver_record, driver_wait, driver_mapped};
}

}  // namespace
