/* The rest of the stand-in driver (libcuda.cc): streams, events, graphs, kernels. */
#include "emulated.h"

#include <string.h>

#undef cuEventElapsedTime /* exported by both of its names */

namespace {

template <typename T>
CUresult remove(std::set<T> &from, T handle) {
    WANT(from.erase(handle), CUDA_ERROR_INVALID_HANDLE);
    delete handle;
    return CUDA_SUCCESS;
}
/* What takes memory of the device beside its own. */
template <typename T>
CUresult add_bytes(std::set<T> &to, T handle, long long bytes) {
    const CUresult full = gpu_lose_bytes(handle->bytes = bytes);
    if (full) {
        delete handle;
        return full;
    }
    to.insert(handle);
    return CUDA_SUCCESS;
}
template <typename T>
CUresult remove_bytes(std::set<T> &from, T handle) {
    WANT(from.count(handle), CUDA_ERROR_INVALID_HANDLE);
    gpu_lose_bytes(-handle->bytes);
    return remove(from, handle);
}

/* A fat binary by itself, or the structure by which a host program refers to one. */
bool is_fatbin(const void *image) {
    uint32_t magic;
    memcpy(&magic, image, sizeof magic);
    return magic == 0xba55ed50 || magic == 0x466243b1;
}

}  // namespace

extern "C" {

CUresult cuStreamCreate(CUstream *out, unsigned flags) {
    ENTER(A_CONTEXT);
    WANT(flags <= CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    *out = new CUstream_st{flags == CU_STREAM_DEFAULT, {}, nullptr};
    gpu.streams.insert(*out);
    return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream stream) {
    ENTER_TO_GIVE(A_CONTEXT);
    WANT(gpu.streams.count(stream), CUDA_ERROR_INVALID_HANDLE);
    stream_drain(stream);
    delete stream->capture;
    LEAVE(remove(gpu.streams, stream));
}
CUresult cuStreamSynchronize(CUstream stream) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    NOT_IN_CAPTURE(s);
    stream_drain(s);
    return gpu.failed;
}
CUresult cuStreamQuery(CUstream stream) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    NOT_IN_CAPTURE(s);
    stream_step(s);
    return gpu.failed ? gpu.failed : s->queue.empty() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    WANT(gpu.events.count(event), CUDA_ERROR_INVALID_HANDLE);
    return stream_wait(s, event);
}

/* ---- events ---- */

CUresult cuEventCreate(CUevent *out, unsigned flags) {
    ENTER(A_CONTEXT);
    WANT(flags <= 7, CUDA_ERROR_INVALID_VALUE);
    *out = new CUevent_st{!(flags & CU_EVENT_DISABLE_TIMING), nullptr};
    gpu.events.insert(*out);
    return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) {
    ENTER_TO_GIVE(A_CONTEXT);
    LEAVE(remove(gpu.events, event));
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    WANT(gpu.events.count(event), CUDA_ERROR_INVALID_HANDLE);
    stream_record(s, event);
    return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent event) {
    ENTER(A_CONTEXT);
    NOT_IN_CAPTURE(nullptr);
    WANT(gpu.events.count(event), CUDA_ERROR_INVALID_HANDLE);
    if (!event->last || event->last->done) return CUDA_SUCCESS;
    WANT(!event->last->captured, CUDA_ERROR_CAPTURED_EVENT);
    stream_step(event->last->on);
    return gpu.failed ? gpu.failed : event->last->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuEventSynchronize(CUevent event) {
    ENTER(A_CONTEXT);
    NOT_IN_CAPTURE(nullptr);
    WANT(gpu.events.count(event), CUDA_ERROR_INVALID_HANDLE);
    const std::shared_ptr<mark> last = event->last;
    WANT(!last || !last->captured, CUDA_ERROR_CAPTURED_EVENT);
    while (last && !last->done) stream_step(last->on);
    return gpu.failed;
}
CUresult cuEventElapsedTime_v2(float *ms, CUevent from, CUevent to) {
    ENTER(A_CONTEXT);
    for (CUevent e : {from, to}) {
        WANT(gpu.events.count(e) && e->timing && e->last, CUDA_ERROR_INVALID_HANDLE);
        WANT(!e->last->captured, CUDA_ERROR_CAPTURED_EVENT);
        WANT(e->last->done, CUDA_ERROR_NOT_READY);
    }
    *ms = (float)(to->last->ms - from->last->ms);
    return CUDA_SUCCESS;
}
CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) { return cuEventElapsedTime_v2(ms, from, to); }

/* ---- kernels ---- */

CUresult cuModuleLoadData(CUmodule *out, const void *image) {
    ENTER(A_CONTEXT);
    NOT_IN_CAPTURE(nullptr);
    WANT(is_fatbin(image), CUDA_ERROR_INVALID_IMAGE);
    *out = new CUmod_st;
    return add_bytes(gpu.modules, *out, (long long)gpu_setting("VAEMEM_EMULATED_MODULE", 0));
}
CUresult cuModuleUnload(CUmodule module) {
    ENTER_TO_GIVE(A_CONTEXT);
    WANT(gpu.modules.count(module), CUDA_ERROR_INVALID_HANDLE);
    streams_drain();
    LEAVE(remove_bytes(gpu.modules, module));
}
/* Every module has all kernels: they are linked into this library. */
CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    ENTER(A_CONTEXT);
    WANT(gpu.modules.count(module), CUDA_ERROR_INVALID_HANDLE);
    const vm_entry *const entry = vm_entry::find(name);
    WANT(entry, CUDA_ERROR_NOT_FOUND);
    *out = &module->functions.try_emplace(name, CUfunc_st{entry}).first->second;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int value) {
    ENTER(A_CONTEXT);
    if (which == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return CUDA_SUCCESS; /* a hint, in percent */
    WANT(which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUDA_ERROR_NOT_SUPPORTED);
    WANT(value >= 0 && value <= gpu_shared_most(), CUDA_ERROR_INVALID_VALUE);
    f->shared_most = (size_t)value;
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *out, CUfunction_attribute which, CUfunction f) {
    ENTER(A_CONTEXT);
    WANT(which == CU_FUNC_ATTRIBUTE_NUM_REGS, CUDA_ERROR_NOT_SUPPORTED);
    /* as nvcc gives them to the kernels that set their threads' registers, of 384 and of 512 threads */
    *out = (int)gpu_setting("VAEMEM_EMULATED_REGISTERS", f->entry->pairs ? 168 : 128);
    return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *out, CUtensorMapDataType type, cuuint32_t rank, void *first,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    ENTER(THE_DRIVER);
    WANT(type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CUDA_ERROR_NOT_SUPPORTED);
    WANT(rank == 3 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
             fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
         CUDA_ERROR_NOT_SUPPORTED);
    WANT(steps[0] == 1 && steps[1] == 1 && steps[2] == 1 && (uintptr_t)out % 64 == 0, CUDA_ERROR_INVALID_VALUE);
    const uint64_t sizes[] = {dims[0], dims[1], dims[2]}, further[] = {strides[0], strides[1]};
    return vm_map_write(out, first, sizes, further, box) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **params, void **extra) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    struct launch {
        const vm_entry *entry;
        uint32_t grid[3], block[3];
        size_t shared;
        std::vector<char> args;
    } l = {f->entry, {gx, gy, gz}, {bx, by, bz}, shared, {}};
    WANT(vm_grid_fits(l.grid, l.block) && shared <= f->shared_most, CUDA_ERROR_INVALID_VALUE);
    WANT(!f->entry->pairs || (capability() >= 90 && gx % 2 == 0), CUDA_ERROR_INVALID_CLUSTER_SIZE);
    WANT(params && !extra, CUDA_ERROR_INVALID_VALUE);
    l.args.assign((const char *)params[0], (const char *)params[0] + f->entry->args_bytes);
    return stream_push(s, [l] {
        gpu.kernels++;
        switch (vm_run_grid(l.entry, l.grid, l.block, l.shared, l.args.data())) {
        case VM_RAN: return CUDA_SUCCESS;
        case VM_ILLEGAL_ADDRESS: return gpu_fail(CUDA_ERROR_ILLEGAL_ADDRESS, emulator_error());
        default: return gpu_fail(CUDA_ERROR_LAUNCH_FAILED, emulator_error());
        }
    });
}

/* ---- graphs ---- */

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *out) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    *out = !s->capture               ? CU_STREAM_CAPTURE_STATUS_NONE
           : s->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                     : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    WANT(gpu.streams.count(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    WANT(!s->capture, CUDA_ERROR_ILLEGAL_STATE);
    s->capture = new CUgraph_st{{}, mode, std::this_thread::get_id()};
    return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph *out) {
    ENTER_TO_GIVE(A_CONTEXT);
    WANT_STREAM(s, stream);
    *out = nullptr;
    const CUgraph graph = s->capture;
    WANT(graph, CUDA_ERROR_ILLEGAL_STATE);
    WANT(graph->mode == CU_STREAM_CAPTURE_MODE_RELAXED || graph->by == std::this_thread::get_id(),
         CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    s->capture = nullptr;
    if (graph->invalidated || entered.failed) {
        delete graph;
        return entered.failed ? entered.failed : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    gpu.graphs.insert(*out = graph);
    return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long) {
    ENTER(A_CONTEXT);
    WANT(gpu.graphs.count(graph), CUDA_ERROR_INVALID_HANDLE);
    *out = new CUgraphExec_st{graph->nodes, 0};
    return add_bytes(gpu.execs, *out, (long long)(graph->nodes.size() * gpu_setting("VAEMEM_EMULATED_NODE", 0)));
}
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    ENTER(A_CONTEXT);
    WANT_STREAM(s, stream);
    WANT(gpu.execs.count(exec), CUDA_ERROR_INVALID_HANDLE);
    CUresult result = CUDA_SUCCESS;
    for (const std::shared_ptr<work> &node : exec->nodes)
        if (!result) result = stream_push(s, *node);
    return result;
}
CUresult cuGraphExecDestroy(CUgraphExec exec) {
    ENTER_TO_GIVE(A_CONTEXT);
    LEAVE(remove_bytes(gpu.execs, exec));
}
CUresult cuGraphDestroy(CUgraph graph) {
    ENTER_TO_GIVE(A_CONTEXT);
    LEAVE(remove(gpu.graphs, graph));
}

}  // extern "C"
