/* The stand-in driver's memory and streams (emulated.h). */
#include "emulated.h"

#include <stdio.h>
#include <stdlib.h>

#include <chrono>

emulated_device gpu;
thread_local bool gpu_waited;

size_t gpu_setting(const char *name, size_t otherwise) {
    const char *const text = getenv(name);
    return text ? strtoull(text, nullptr, 0) : otherwise;
}

size_t gpu_total() { return gpu_setting("VAEMEM_EMULATED_MEMORY", (size_t)2 << 30); }

size_t gpu_granularity() { return gpu_setting("VAEMEM_EMULATED_GRANULARITY", MEMORY_ALIGN); }

CUresult gpu_fail(CUresult code, const char *why) {
    fprintf(stderr, "emulated GPU: %s\n", why);
    if (!gpu.failed) gpu.failed = code;
    return code;
}

/* ---- memory ---- */

CUresult gpu_lose_bytes(long long bytes) {
    const size_t total = gpu_total();
    if (bytes > 0 && (gpu.used > total || (size_t)bytes > total - gpu.used)) return CUDA_ERROR_OUT_OF_MEMORY;
    gpu.used += (size_t)bytes;
    if (gpu.used > gpu.peak) gpu.peak = gpu.used;
    return CUDA_SUCCESS;
}

CUresult gpu_take(size_t bytes, bool host, void **out) {
    *out = nullptr;
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    if (bytes > SIZE_MAX / 2) return CUDA_ERROR_OUT_OF_MEMORY;
    const size_t granularity = gpu_granularity(), counted = (bytes + granularity - 1) / granularity * granularity;
    const CUresult full = gpu_lose_bytes(host ? 0 : (long long)counted);
    if (full) return full;
    void *const at = vm_guarded_take(bytes, MEMORY_ALIGN);
    if (!at) {
        gpu_lose_bytes(host ? 0 : -(long long)counted);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    gpu.memory[(uintptr_t)at] = {bytes, host ? 0 : counted, host};
    *out = at;
    return CUDA_SUCCESS;
}

CUresult gpu_give(uintptr_t at, bool host) {
    const auto found = gpu.memory.find(at);
    if (found == gpu.memory.end() || found->second.host != host) return CUDA_ERROR_INVALID_VALUE;
    if (gpu.in_flight && !gpu_waited && !gpu.failed)
        return gpu_fail(CUDA_ERROR_ILLEGAL_ADDRESS, "memory given back under work");
    const size_t bytes = found->second.bytes;
    const bool whole = vm_guarded_whole((void *)at, bytes, MEMORY_ALIGN);
    vm_guarded_give((void *)at, bytes, MEMORY_ALIGN);
    gpu.used -= found->second.counted;
    gpu.memory.erase(found);
    if (whole) return CUDA_SUCCESS;
    char why[96];
    snprintf(why, sizeof why, "something was written beside a block of %zu bytes", bytes);
    return gpu_fail(CUDA_ERROR_ILLEGAL_ADDRESS, why);
}

bool gpu_has(uintptr_t at, size_t bytes) {
    auto after = gpu.memory.upper_bound(at);
    if (after == gpu.memory.begin()) return false;
    const auto &[start, block] = *--after;
    return !block.host && at - start <= block.bytes && bytes <= block.bytes - (at - start);
}

void gpu_lose() {
    for (const auto &[at, block] : gpu.memory) vm_guarded_give((void *)at, block.bytes, MEMORY_ALIGN);
    for (CUevent e : gpu.events) delete e;
    for (CUstream s : gpu.streams) {
        delete s->capture;
        delete s;
    }
    for (CUgraph g : gpu.graphs) delete g;
    for (CUgraphExec e : gpu.execs) delete e;
    for (CUmodule m : gpu.modules) delete m;
    gpu = emulated_device();
}

/* ---- streams ---- */

CUstream stream_of(CUstream handle) {
    if (!handle || handle == CU_STREAM_LEGACY) return &gpu.legacy;
    if (handle == CU_STREAM_PER_THREAD) return &gpu.per_thread;
    return gpu.streams.count(handle) ? handle : nullptr;
}

void stream_step(CUstream s) {
    if (s->queue.empty()) return;
    const std::shared_ptr<work> w = s->queue.front();
    s->queue.pop_front();
    const CUresult result = (*w)();
    if (result && !gpu.failed) gpu_fail(result, emulator_error());
}

void stream_drain(CUstream s) {
    while (!s->queue.empty()) stream_step(s);
}

void streams_drain() {
    stream_drain(&gpu.legacy);
    stream_drain(&gpu.per_thread);
    for (CUstream s : gpu.streams) stream_drain(s);
}

static double now_ms() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(now).count();
}

static void enqueue(CUstream s, work w) { s->queue.push_back(std::make_shared<work>(std::move(w))); }

static std::shared_ptr<mark> put_mark(CUstream s) {
    auto m = std::make_shared<mark>();
    m->on = s;
    enqueue(s, [m] {
        m->ms = now_ms();
        m->done = true;
        return CUDA_SUCCESS;
    });
    return m;
}

static void put_wait(CUstream s, std::shared_ptr<mark> m) {
    enqueue(s, [m] {
        while (!m->done) stream_step(m->on);
        return CUDA_SUCCESS;
    });
}

static void order_after(CUstream s, CUstream before) {
    if (before != s && !before->queue.empty()) put_wait(s, put_mark(before));
}

/* What CUDA promises about the NULL stream and those that were not made non-blocking. */
static void order_with_legacy(CUstream s) {
    if (s != &gpu.legacy) {
        if (s->blocking) order_after(s, &gpu.legacy);
        return;
    }
    order_after(s, &gpu.per_thread);
    for (CUstream other : gpu.streams)
        if (other->blocking) order_after(s, other);
}

CUresult stream_push(CUstream s, work w) {
    work guarded = [w = std::move(w)] { return gpu.failed ? CUDA_SUCCESS : w(); };
    if (s->capture) {
        if (s->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        s->capture->nodes.push_back(std::make_shared<work>(std::move(guarded)));
        return CUDA_SUCCESS;
    }
    if (s == &gpu.legacy)
        for (CUstream other : gpu.streams)
            if (other->blocking && other->capture) {
                other->capture->invalidated = true;
                return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
            }
    order_with_legacy(s);
    gpu.in_flight++;
    gpu_waited = false;
    enqueue(s, [guarded = std::move(guarded)] {
        gpu.in_flight--;
        return guarded();
    });
    return CUDA_SUCCESS;
}

void stream_record(CUstream s, CUevent e) {
    if (!s->capture) {
        order_with_legacy(s);
        e->last = put_mark(s);
        return;
    }
    e->last = std::make_shared<mark>();
    e->last->on = s;
    e->last->captured = true;
}

CUresult stream_wait(CUstream s, CUevent e) {
    const std::shared_ptr<mark> m = e->last;
    if (!m) return CUDA_SUCCESS;
    if (m->captured) {
        if (m->on != s) return CUDA_ERROR_CAPTURED_EVENT; /* a fork, or a capture that has ended */
        return s->capture ? CUDA_SUCCESS : CUDA_ERROR_CAPTURED_EVENT;
    }
    if (s->capture) {
        s->capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!m->done) put_wait(s, m);
    return CUDA_SUCCESS;
}

CUresult capture_forbids(CUstream asked) {
    for (CUstream s : gpu.streams) {
        if (!s->capture) continue;
        const CUstreamCaptureMode mode = s->capture->mode;
        const bool ours = s->capture->by == std::this_thread::get_id();
        if (s == asked || mode == CU_STREAM_CAPTURE_MODE_GLOBAL ||
            (mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && ours)) {
            s->capture->invalidated = true;
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return CUDA_SUCCESS;
}
