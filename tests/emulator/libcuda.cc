/* A stand-in for libcuda.so.1: one GPU that is this computer, with our kernels in it.
 *
 *   VAEMEM_EMULATED_SM=90               compute capability
 *   VAEMEM_EMULATED_MEMORY=2147483648   bytes of the device
 *   VAEMEM_EMULATED_GRANULARITY=256     memory is given in multiples of so many bytes; a real GPU's are 2 MiB
 *   VAEMEM_EMULATED_MODULE=0            bytes of the device that a module takes
 *   VAEMEM_EMULATED_NODE=0              and each kernel of a graph that is ready
 *   VAEMEM_EMULATED_CUDNN=0             and each of cuDNN's plans, from its first run on (libcudnn.c)
 *   VAEMEM_EMULATED_L2=1048576          bytes of its L2 cache
 *   VAEMEM_EMULATED_MULTIPROCESSORS=4   of the device
 *   VAEMEM_EMULATED_REGISTERS           of a thread of each kernel; 168 for pairs of blocks, 128 for others
 *   VAEMEM_EMULATED_DRIVER=12040        version that the driver says it is
 *
 * Device memory is host memory, filled with 0xff. Calls that CUDA forbids are refused as CUDA does. What gives
 * something back does so even when an injected or an earlier failure is what it returns. Objects that a released
 * context leaves behind stay counted by emulator_live, so that leaks are seen. */
#include "emulated.h"

#include <stdio.h>
#include <string.h>

std::recursive_mutex vm_lock;
thread_local std::vector<CUcontext> vm_contexts;

namespace {

bool started;
struct {
    size_t calls, at;
    CUresult code;
    bool sticky;
} inject;

}  // namespace

call::call(needs n) {
    inject.calls++;
    if (n >= THE_DRIVER && !started) refused = CUDA_ERROR_NOT_INITIALIZED;
    if (n == A_CONTEXT && !refused) {
        if (vm_contexts.empty() || !vm_contexts.back())
            refused = CUDA_ERROR_INVALID_CONTEXT;
        else if (!vm_contexts.back()->users)
            refused = CUDA_ERROR_CONTEXT_IS_DESTROYED;
        failed = gpu.failed;
    }
    if (inject.calls != inject.at) return;
    failed = inject.code;
    if (inject.sticky) gpu.failed = inject.code;
}

int capability() { return (int)gpu_setting("VAEMEM_EMULATED_SM", 90); }

int gpu_shared_most() {
    switch (capability()) {
    case 75: return 64 << 10;
    case 80:
    case 87: return 163 << 10;
    case 86:
    case 89:
    case 120: return 99 << 10;
    default: return 227 << 10;
    }
}

namespace {

/* Device memory is looked up again when the copy runs: a graph may outlive it. */
CUresult push_copy(CUstream s, void *to, const void *from, size_t bytes, bool to_device, bool from_device) {
    const work w = [=] {
        if ((to_device && !gpu_has((uintptr_t)to, bytes)) || (from_device && !gpu_has((uintptr_t)from, bytes)))
            return gpu_fail(CUDA_ERROR_ILLEGAL_ADDRESS, "copy of memory that was given back");
        memmove(to, from, bytes);
        return CUDA_SUCCESS;
    };
    WANT(!to_device || gpu_has((uintptr_t)to, bytes), CUDA_ERROR_INVALID_VALUE);
    WANT(!from_device || gpu_has((uintptr_t)from, bytes), CUDA_ERROR_INVALID_VALUE);
    return stream_push(s, w);
}

struct plane {
    char *at;
    size_t pitch;
};
CUresult plane_of(plane *out, CUmemorytype type, const void *host, CUdeviceptr device, size_t x, size_t y, size_t pitch,
                  const CUDA_MEMCPY2D &c) {
    const bool on_host = type == CU_MEMORYTYPE_HOST;
    WANT(on_host || type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED, CUDA_ERROR_NOT_SUPPORTED);
    out->pitch = pitch ? pitch : c.WidthInBytes;
    WANT(out->pitch >= x + c.WidthInBytes || c.Height <= 1, CUDA_ERROR_INVALID_VALUE);
    out->at = (on_host ? (char *)host : (char *)device) + y * out->pitch + x;
    WANT(type != CU_MEMORYTYPE_DEVICE || !c.Height ||
             gpu_has((uintptr_t)out->at, (c.Height - 1) * out->pitch + c.WidthInBytes),
         CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

struct error_text {
    CUresult code;
    const char *name, *text;
};
#define TEXT(CODE, WORDS) {CODE, #CODE, WORDS}
const error_text errors[] = {
    TEXT(CUDA_SUCCESS, "no error"),
    TEXT(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    TEXT(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    TEXT(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    TEXT(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    TEXT(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    TEXT(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    TEXT(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    TEXT(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    TEXT(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    TEXT(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    TEXT(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    TEXT(CUDA_ERROR_NOT_READY, "device not ready"),
    TEXT(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    TEXT(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    TEXT(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    TEXT(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    TEXT(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    TEXT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    TEXT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    TEXT(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    TEXT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing stream"),
    TEXT(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "attempt to terminate a capture from another thread"),
    TEXT(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    TEXT(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    TEXT(CUDA_ERROR_UNKNOWN, "unknown error"),
};
const error_text *error_of(CUresult code) {
    for (const error_text &e : errors)
        if (e.code == code) return &e;
    return nullptr;
}

}  // namespace

extern "C" {

/* ---- for tests ---- */

/* The nth call from now fails with code; where sticky, all after it too. 0: none will. */
void emulator_fail_at(size_t nth, int code, int sticky) {
    const std::lock_guard<std::recursive_mutex> held(vm_lock);
    inject.at = nth ? inject.calls + nth : 0;
    inject.code = (CUresult)code;
    inject.sticky = sticky;
}
size_t emulator_calls() { return inject.calls; }
size_t emulator_launches() { return gpu.kernels; }
/* The most device memory since the last question. */
size_t emulator_peak() {
    const size_t peak = gpu.peak;
    gpu.peak = gpu.used;
    return peak;
}
/* Bytes and blocks of the device, blocks of pinned memory, streams, events, graphs, ready graphs, modules, contexts. */
void emulator_live(size_t counts[9]) {
    const std::lock_guard<std::recursive_mutex> held(vm_lock);
    size_t host = 0;
    for (const auto &[at, block] : gpu.memory) host += block.host;
    const size_t now[9] = {gpu.used,           gpu.memory.size() - host, host,
                           gpu.streams.size(), gpu.events.size(),        gpu.graphs.size(),
                           gpu.execs.size(),   gpu.modules.size(),       (size_t)gpu.context.users};
    memcpy(counts, now, sizeof now);
}
/* What others take of the device's memory, or give back where bytes is negative. */
CUresult emulator_lose(long long bytes) {
    const std::lock_guard<std::recursive_mutex> held(vm_lock);
    return gpu_lose_bytes(bytes);
}
/* fn(arg), each time that this place of the stream or of a graph is reached. */
CUresult emulator_enqueue(CUstream stream, void (*fn)(void *), void *arg, void (*free_arg)(void *)) {
    const std::lock_guard<std::recursive_mutex> held(vm_lock);
    const std::shared_ptr<void> kept(arg, [free_arg](void *p) {
        if (free_arg) free_arg(p);
    });
    WANT_STREAM(s, stream);
    return stream_push(s, [fn, kept] {
        fn(kept.get());
        return CUDA_SUCCESS;
    });
}

/* ---- the driver and its device ---- */

CUresult cuGetErrorName(CUresult code, const char **out) {
    const error_text *const e = error_of(code);
    *out = e ? e->name : nullptr;
    return e ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult code, const char **out) {
    const error_text *const e = error_of(code);
    *out = e ? e->text : nullptr;
    return e ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuInit(unsigned flags) {
    ENTER(NOTHING);
    WANT(!flags, CUDA_ERROR_INVALID_VALUE);
    started = true;
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *out) {
    ENTER(NOTHING);
    *out = (int)gpu_setting("VAEMEM_EMULATED_DRIVER", 12040);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int *out) {
    ENTER(THE_DRIVER);
    *out = 1;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *out, int ordinal) {
    ENTER(THE_DRIVER);
    WANT(ordinal == 0, CUDA_ERROR_INVALID_DEVICE);
    *out = 0;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
    ENTER(THE_DRIVER);
    WANT(device == 0, CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)room, "Emulated GPU");
    return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t *out, CUdevice device) {
    ENTER(THE_DRIVER);
    WANT(device == 0, CUDA_ERROR_INVALID_DEVICE);
    *out = gpu_total();
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute which, CUdevice device) {
    ENTER(THE_DRIVER);
    WANT(device == 0, CUDA_ERROR_INVALID_DEVICE);
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = capability() / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out = capability() % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out = (int)gpu_setting("VAEMEM_EMULATED_MULTIPROCESSORS", 4); break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *out = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *out = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *out = 48 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *out = gpu_shared_most(); break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *out = gpu_shared_most() + 1024; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *out = (int)gpu_setting("VAEMEM_EMULATED_L2", 1 << 20); break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *out = 1; break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: *out = 0; break;
    case CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST: *out = 1; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

/* ---- contexts ---- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    ENTER(THE_DRIVER);
    WANT(device == 0, CUDA_ERROR_INVALID_DEVICE);
    if (!gpu.context.users++) gpu.failed = CUDA_SUCCESS;
    *out = &gpu.context;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER_TO_GIVE(THE_DRIVER);
    WANT(device == 0, CUDA_ERROR_INVALID_DEVICE);
    WANT(gpu.context.users, CUDA_ERROR_INVALID_CONTEXT);
    if (!--gpu.context.users) streams_drain();
    LEAVE(CUDA_SUCCESS);
}
/* Another user of the device may reset it while we use it. */
CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    ENTER(THE_DRIVER);
    WANT(device == 0, CUDA_ERROR_INVALID_DEVICE);
    gpu_lose();
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER(THE_DRIVER);
    WANT(context == &gpu.context, CUDA_ERROR_INVALID_CONTEXT);
    WANT(context->users, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    vm_contexts.push_back(context);
    gpu_waited = false;
    return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext *out) {
    ENTER_TO_GIVE(THE_DRIVER);
    WANT(!vm_contexts.empty(), CUDA_ERROR_INVALID_CONTEXT);
    if (out) *out = vm_contexts.back();
    vm_contexts.pop_back();
    gpu_waited = false;
    LEAVE(CUDA_SUCCESS);
}
CUresult cuCtxGetCurrent(CUcontext *out) {
    ENTER(THE_DRIVER);
    *out = vm_contexts.empty() ? nullptr : vm_contexts.back();
    return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize(void) {
    ENTER(A_CONTEXT);
    NOT_IN_CAPTURE(nullptr);
    streams_drain();
    gpu_waited = true;
    return gpu.failed;
}

/* ---- memory ---- */

CUresult cuMemGetInfo(size_t *free, size_t *total) {
    ENTER(A_CONTEXT);
    *total = gpu_total();
    *free = *total > gpu.used ? *total - gpu.used : 0;
    return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags which) {
    ENTER(THE_DRIVER);
    WANT(prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
             !prop->location.id && which == CU_MEM_ALLOC_GRANULARITY_MINIMUM,
         CUDA_ERROR_INVALID_VALUE);
    *out = gpu_granularity();
    return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr *out, size_t bytes) {
    ENTER(A_CONTEXT);
    NOT_IN_CAPTURE(nullptr);
    return gpu_take(bytes, false, (void **)out);
}
CUresult cuMemFree(CUdeviceptr at) {
    ENTER_TO_GIVE(A_CONTEXT);
    NOT_IN_CAPTURE(nullptr);
    if (!at) return entered.failed;
    LEAVE(gpu_give(at, false));
}
CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned) {
    ENTER(A_CONTEXT);
    NOT_IN_CAPTURE(nullptr);
    return gpu_take(bytes, true, out);
}
CUresult cuMemFreeHost(void *at) {
    ENTER_TO_GIVE(A_CONTEXT);
    NOT_IN_CAPTURE(nullptr);
    LEAVE(gpu_give((uintptr_t)at, true));
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    return push_copy(s, (void *)to, from, bytes, true, false);
}
CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    return push_copy(s, to, (const void *)from, bytes, false, true);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    return push_copy(s, (void *)to, (const void *)from, bytes, true, true);
}
CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *what, CUstream stream) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    const CUDA_MEMCPY2D c = *what;
    plane from, to;
    CUresult result = plane_of(&from, c.srcMemoryType, c.srcHost, c.srcDevice, c.srcXInBytes, c.srcY, c.srcPitch, c);
    if (!result) result = plane_of(&to, c.dstMemoryType, c.dstHost, c.dstDevice, c.dstXInBytes, c.dstY, c.dstPitch, c);
    if (result) return result;
    return stream_push(s, [from, to, c] {
        for (size_t row = 0; row < c.Height; row++)
            memmove(to.at + row * to.pitch, from.at + row * from.pitch, c.WidthInBytes);
        return CUDA_SUCCESS;
    });
}
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, CUstream stream) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    WANT(gpu_has(at, bytes), CUDA_ERROR_INVALID_VALUE);
    return stream_push(s, [at, value, bytes] {
        if (!gpu_has(at, bytes)) return gpu_fail(CUDA_ERROR_ILLEGAL_ADDRESS, "memset of memory that was given back");
        memset((void *)at, value, bytes);
        return CUDA_SUCCESS;
    });
}
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr at) {
    ENTER(THE_DRIVER);
    auto after = gpu.memory.upper_bound(at);
    WANT(after != gpu.memory.begin(), CUDA_ERROR_INVALID_VALUE);
    const auto &[start, block] = *--after;
    WANT(at - start < block.bytes, CUDA_ERROR_INVALID_VALUE);
    switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = &gpu.context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)out = block.host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        WANT(block.host || which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CUDA_ERROR_INVALID_VALUE);
        *(CUdeviceptr *)out = at;
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(bool *)out = false; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = 0; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)out = start; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = block.bytes; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

}  // extern "C"
