/* The vm_device of a GPU: memory, copies, runs, graphs.
 *
 *   compute stream   begun | passes of item 0 | passes of item 1 ...          | done
 *   copy stream            send 1 (once item 0's first pass has read its input)
 *                          fetch 0 (once its last pass is done, before item 1's last pass)
 *
 * A run waits for the one before it, on any streams: they share one arena. */
#define _GNU_SOURCE
#include "gpu.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- memory ---- */

static vm_status take(const vm_backend *b, size_t bytes, void **out) {
    vm_gpu *g = b->self;
    CUdeviceptr at = 0;
    size_t free = 0, total = 0;
    *out = NULL;
    VM_ENTER(g);
    const CUresult result = g->d->MemAlloc(&at, VM_MAX(bytes, 1));
    *out = (void *)(uintptr_t)at;
    if (result == CUDA_ERROR_OUT_OF_MEMORY && !g->d->MemGetInfo(&free, &total))
        return vm_fail(VM_ENOMEM, "%s: expected %.1f MiB more, %.1f of %.1f MiB are free", b->name,
                       (double)bytes / 1048576, (double)free / 1048576, (double)total / 1048576);
    return vm_driver_check(g->d, result, "taking memory");
}

static void give(const vm_backend *b, void *block, size_t bytes) {
    (void)bytes;
    vm_gpu *g = b->self;
    if (vm_gpu_enter(g)) return; /* the context is gone, and its memory too */
    g->d->CtxSynchronize();      /* other streams may still use it: MemFree need not wait */
    g->d->MemFree((CUdeviceptr)(uintptr_t)block);
    vm_gpu_leave(g);
}

vm_status vm_gpu_memory(vm_gpu *g, size_t *free, size_t *total) {
    VM_ENTER(g);
    VM_TRY(g, MemGetInfo(free, total), "asking for the free memory");
    return VM_OK;
}

vm_status vm_gpu_watch(void *gpu, bool begin, size_t *free) {
    vm_gpu *g = gpu;
    const size_t before = *free;
    size_t total;
    vm_status s = vm_gpu_memory(g, free, &total);
    if (!s && !begin) g->unaccounted += (ptrdiff_t)(before - *free);
    return s;
}

size_t vm_gpu_to_come(const vm_gpu *g) {
    size_t more = 0;
    for (int i = 0; i < VM_GPU_GRAPHS; i++) more += g->graph[i].exec ? 0 : g->graph_most;
    return more;
}

/* ---- copies ---- */

static char *slot_of(const vm_gpu *g, size_t slot) { return g->pinned + slot * VM_GPU_SLOT; }
static uint32_t *flags_of(const vm_gpu *g) { return (uint32_t *)(g->pinned + VM_GPU_SLOTS * VM_GPU_SLOT); }

/* Copies to the device through pinned memory, on the copy stream. `from` is free on return. Requires g->copying. */
static vm_status copy_in(vm_gpu *g, void *to, const char *from, size_t bytes) {
    for (size_t done = 0, n; done < bytes; done += n) {
        const size_t slot = g->next_slot++ % VM_GPU_SLOTS;
        n = VM_MIN(bytes - done, VM_GPU_SLOT);
        VM_TRY(g, EventSynchronize(g->slot[slot]), "waiting for a copy");
        memcpy(slot_of(g, slot), from + done, n);
        VM_TRY(g, MemcpyHtoDAsync((CUdeviceptr)(uintptr_t)to + done, slot_of(g, slot), n, g->copy),
               "copying to the GPU");
        VM_TRY(g, EventRecord(g->slot[slot], g->copy), "marking a copy");
    }
    return VM_OK;
}

/* Copies from the device likewise: the host empties one slot while the GPU fills the next. */
static vm_status copy_out(vm_gpu *g, char *to, const void *from, size_t bytes) {
    const size_t slots = (bytes + VM_GPU_SLOT - 1) / VM_GPU_SLOT, first = g->next_slot;
    g->next_slot += slots;
    for (size_t i = 0; i < slots + 1; i++) {
        if (i < slots) {
            const size_t slot = (first + i) % VM_GPU_SLOTS, at = i * VM_GPU_SLOT;
            VM_TRY(g, EventSynchronize(g->slot[slot]), "waiting for a copy"); /* of an earlier call */
            VM_TRY(g,
                   MemcpyDtoHAsync(slot_of(g, slot), (CUdeviceptr)(uintptr_t)from + at, VM_MIN(bytes - at, VM_GPU_SLOT),
                                   g->copy),
                   "copying from the GPU");
            VM_TRY(g, EventRecord(g->slot[slot], g->copy), "marking a copy");
        }
        if (i > 0) {
            const size_t slot = (first + i - 1) % VM_GPU_SLOTS, at = (i - 1) * VM_GPU_SLOT;
            VM_TRY(g, EventSynchronize(g->slot[slot]), "waiting for a copy");
            memcpy(to + at, slot_of(g, slot), VM_MIN(bytes - at, VM_GPU_SLOT));
        }
    }
    return VM_OK;
}

/* The slots have one user at a time: a run, or a thread that reads an array. */
static vm_status locked_copy(vm_gpu *g, bool in, void *to, const void *from, size_t bytes) {
    pthread_mutex_lock(&g->copying);
    vm_status s = in ? copy_in(g, to, from, bytes) : copy_out(g, to, from, bytes);
    pthread_mutex_unlock(&g->copying);
    return s;
}

static vm_status send(const vm_backend *b, void *to, const void *from, size_t bytes) {
    vm_gpu *g = b->self;
    VM_ENTER(g);
    VM_TRY(g, StreamWaitEvent(g->copy, g->begun, 0), "ordering copies");
    VM_TRY(g, StreamWaitEvent(g->copy, g->input_free, 0), "ordering copies");
    vm_status s = locked_copy(g, true, to, from, bytes);
    if (s) return s;
    VM_TRY(g, EventRecord(g->input_sent, g->copy), "marking a copy");
    VM_TRY(g, StreamWaitEvent(g->stream, g->input_sent, 0), "ordering copies");
    return VM_OK;
}

static vm_status fetch(const vm_backend *b, void *to, const void *from, size_t bytes) {
    vm_gpu *g = b->self;
    VM_ENTER(g);
    VM_TRY(g, StreamWaitEvent(g->copy, g->output_ready, 0), "ordering copies");
    return locked_copy(g, false, to, from, bytes);
}

static vm_status set_weight(const vm_backend *b, const vm_weight *w, void *to, vm_dtype dtype, const void *data,
                            bool *rounded) {
    *rounded = true; /* makes get_weight refuse */
    vm_gpu *g = b->self;
    VM_ENTER(g);
    const size_t bytes = vm_gpu_weight_bytes(b, w);
    void *packed = malloc(bytes);
    if (!packed) return vm_fail(VM_ENOMEM, "no %zu bytes of host memory to pack it in", bytes);
    vm_status s;
    if ((s = vm_gpu_pack_weight(b, w, packed, dtype, data))) goto done;
    if ((s = vm_driver_check(g->d, g->d->StreamWaitEvent(g->copy, g->done, 0), "ordering copies"))) goto done;
    s = locked_copy(g, true, to, packed, bytes);
done:
    free(packed);
    return s;
}

static vm_status get_weight(const vm_backend *b, const vm_weight *w, const void *from, float *data) {
    if (w->vector) return fetch(b, data, from, w->out * sizeof *data);
    return vm_fail(VM_EINVAL, VM_EXPECTED("", "a model on the CPU", "one on %s, whose copy is rounded and folded"),
                   b->name);
}

/* ---- runs ---- */

static vm_status start(const vm_backend *b, void *stream) {
    vm_gpu *g = b->self;
    VM_ENTER(g);
    g->stream = stream ? stream : g->own;
    g->paced = 0;
    VM_TRY(g, StreamWaitEvent(g->stream, g->done, 0), "ordering runs");
    for (int i = 0; i < VM_GPU_SLOTS; i++) /* weights may still be in flight */
        VM_TRY(g, StreamWaitEvent(g->stream, g->slot[i], 0), "ordering copies");
    VM_TRY(g, MemsetD8Async((CUdeviceptr)(uintptr_t)g->flags, 0, 2 * sizeof *g->flags, g->stream),
           "clearing the flags");
    VM_TRY(g, EventRecord(g->begun, g->stream), "marking the beginning");
    return VM_OK;
}

static void nothing(const void *job, size_t task, unsigned thread) { (void)job, (void)task, (void)thread; }

/* Waits for an event; with exec it polls with short naps, so that the run can be stopped. */
static vm_status wait_for(const vm_gpu *g, CUevent event, const vm_exec *exec) {
    if (!exec) return vm_driver_check(g->d, g->d->EventSynchronize(event), "waiting for the GPU");
    for (;;) {
        const CUresult result = g->d->EventQuery(event);
        if (result != CUDA_ERROR_NOT_READY) return vm_driver_check(g->d, result, "waiting for the GPU");
        vm_status s = exec->each(exec->pool, 1, 0, nothing, NULL);
        if (s) return s;
        nanosleep(&(struct timespec){0, 20000}, NULL);
    }
}

static vm_status step_enqueued(const vm_backend *b, size_t step, size_t rows, const vm_exec *exec) {
    vm_gpu *g = b->self;
    if (g->outside) return VM_OK; /* the host captures, and need not wait */
    VM_ENTER(g);
    if (step == 0) VM_TRY(g, EventRecord(g->input_free, g->stream), "marking a pass");
    if (step < VM_GPU_STEPS) VM_TRY(g, EventRecord(g->step[step], g->stream), "marking a pass");
    if (!exec) return VM_OK;
    CUevent const pace = g->pace[g->paced % VM_GPU_LAG];
    vm_status s;
    if (g->paced++ >= VM_GPU_LAG && (s = wait_for(g, pace, exec))) return s;
    VM_TRY(g, EventRecord(pace, g->stream), "marking a pass");
    return exec->each(exec->pool, 1, rows, nothing, NULL);
}

static void seconds(const vm_backend *b, size_t step, double *seconds) {
    vm_gpu *g = b->self;
    float ms = 0;
    *seconds = 0;
    if (step >= VM_GPU_STEPS || vm_gpu_enter(g)) return;
    if (!g->d->EventElapsedTime(&ms, step ? g->step[step - 1] : g->item, g->step[step])) *seconds = ms * 1e-3;
    vm_gpu_leave(g);
}

static vm_status finish(const vm_backend *b, const vm_exec *exec, bool wait, bool *overflow) {
    vm_gpu *g = b->self;
    *overflow = false;
    VM_ENTER(g);
    if (wait)
        VM_TRY(g, MemcpyDtoHAsync(flags_of(g), (CUdeviceptr)(uintptr_t)g->flags, sizeof *g->flags, g->stream),
               "reading the flags");
    VM_TRY(g, EventRecord(g->done, g->stream), "marking the end");
    if (!wait) return VM_OK;
    vm_status s = wait_for(g, g->done, exec);
    if (s == VM_ECANCELLED) { /* nothing may run on after its memory is freed */
        VM_TRY(g, EventSynchronize(g->done), "waiting for the GPU");
        return vm_fail(s, "the run was cancelled");
    }
    if (!s) *overflow = *flags_of(g) != 0;
    return s;
}

vm_status vm_gpu_order(vm_gpu *g, void *stream) {
    VM_ENTER(g);
    VM_TRY(g, StreamWaitEvent(stream, g->done, 0), "ordering streams");
    return VM_OK;
}

vm_status vm_gpu_check_stream(vm_gpu *g, void *stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    VM_ENTER(g);
    VM_TRY(g, StreamIsCapturing(stream, &status), "asking whether the stream is captured");
    if (status == CU_STREAM_CAPTURE_STATUS_NONE) return VM_OK;
    return vm_fail(VM_EINVAL, VM_EXPECTED("stream", "one that is not being captured",
                                          "one that is (vae.graphs = True keeps a graph of its own)"));
}

vm_status vm_gpu_read(vm_gpu *g, void *to, const void *from, size_t bytes) {
    VM_ENTER(g);
    VM_TRY(g, StreamWaitEvent(g->copy, g->done, 0), "ordering copies");
    return locked_copy(g, false, to, from, bytes);
}

/* ---- tiles ---- */

static vm_status blend(const vm_backend *b, void *stream, const vm_blend_args *args) {
    vm_gpu *g = b->self;
    if (!stream) stream = g->own;
    const size_t threads = VM_PRODUCT(args->batch, args->y_c, VM_MIN(args->h, args->step), VM_MIN(args->w, args->step));
    const size_t blocks = (threads + VM_CUDA_THREADS - 1) / VM_CUDA_THREADS, most = (size_t)g->multiprocessors * 32;
    VM_ENTER(g);
    VM_TRY(g,
           LaunchKernel(g->kernel[VM_KERNEL_BLEND], (unsigned)VM_MIN(blocks, most), 1, 1, VM_CUDA_THREADS, 1, 1, 0,
                        stream, (void *[]){(void *)args}, NULL),
           "blending a tile");
    VM_TRY(g, StreamSynchronize(stream), "blending a tile");
    return VM_OK;
}

/* ---- graphs ---- */

static vm_graph_entry *find_graph(vm_gpu *g, uint64_t key) {
    for (int i = 0; i < VM_GPU_GRAPHS; i++)
        if (g->graph[i].used && g->graph[i].key == key) return &g->graph[i];
    return NULL;
}

static vm_status launch_graph(vm_gpu *g, vm_graph_entry *e) {
    e->used = ++g->graph_clock;
    return vm_driver_check(g->d, g->d->GraphLaunch(e->exec, g->stream), "launching a graph");
}

static vm_status drop_graph(vm_gpu *g, vm_graph_entry *e) {
    CUgraphExec const exec = e->exec;
    size_t free = 0;
    *e = (vm_graph_entry){0};
    if (!exec) return VM_OK;
    vm_status s = vm_gpu_watch(g, true, &free);
    g->d->GraphExecDestroy(exec);
    return s ? s : vm_gpu_watch(g, false, &free);
}

/* Gives the key the entry of the least recently used graph. */
static vm_status new_graph(vm_gpu *g, uint64_t key) {
    vm_graph_entry *e = &g->graph[0];
    for (int i = 0; i < VM_GPU_GRAPHS; i++)
        if (g->graph[i].used < e->used) e = &g->graph[i];
    vm_status s = drop_graph(g, e);
    *e = (vm_graph_entry){.key = key, .used = ++g->graph_clock};
    return s;
}

/* At a key's first run its passes are enqueued one by one: libraries then load code and time engines, which a capture
 * forbids. The second time they are captured, unless there are too many, on the GPU's own stream (the caller's may not
 * allow it), and launched on the run's. */
static vm_status begin(const vm_backend *b, uint64_t key, bool *replayed) {
    vm_gpu *g = b->self;
    *replayed = false;
    g->launches = 0;
    VM_ENTER(g);
    vm_graph_entry *e = key ? find_graph(g, key) : NULL;
    VM_TRY(g, EventRecord(g->item, g->stream), "marking the beginning");
    *replayed = e && e->exec;
    if (*replayed) return launch_graph(g, e);
    if (key && !e) return new_graph(g, key);
    if (!e || e->nodes > VM_GPU_NODES) return VM_OK;
    VM_TRY(g, StreamBeginCapture(g->own, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "beginning a graph");
    g->outside = g->stream;
    g->stream = g->own;
    return VM_OK;
}

static vm_status end_capture(vm_gpu *g, vm_graph_entry *e, vm_status so_far) {
    CUgraph graph = NULL;
    size_t free = 0, after;
    g->stream = g->outside;
    g->outside = NULL;
    const CUresult result = g->d->StreamEndCapture(g->own, &graph);
    vm_status s;
    if ((s = so_far ? so_far : vm_driver_check(g->d, result, "ending a graph"))) goto done;
    if ((s = vm_gpu_watch(g, true, &free))) goto done;
    s = vm_driver_check(g->d, g->d->GraphInstantiate(&e->exec, graph, 0), "making a graph ready");
done:
    if (graph) g->d->GraphDestroy(graph);
    if (s) return s;
    if ((s = launch_graph(g, e))) return s;
    after = free;
    s = vm_gpu_watch(g, false, &after);
    if (!s && free > after) g->graph_most = VM_MAX(g->graph_most, free - after);
    return s;
}

static vm_status end(const vm_backend *b, uint64_t key, vm_status so_far) {
    vm_gpu *g = b->self;
    VM_ENTER(g);
    vm_graph_entry *e = key ? find_graph(g, key) : NULL;
    vm_status s = g->outside ? end_capture(g, e, so_far) : so_far;
    if (s && e) drop_graph(g, e); /* its next run goes pass by pass again */
    if (s) return s;
    if (e && !e->exec) e->nodes = g->launches;
    if (key) VM_TRY(g, EventRecord(g->input_free, g->stream), "marking a pass");
    VM_TRY(g, EventRecord(g->output_ready, g->stream), "marking a pass");
    return VM_OK;
}

/* ---- timing ---- */

double vm_gpu_time(void *gpu, vm_status (*run)(void *job), void *job) {
    enum { RUNS = 3 };
    vm_gpu *g = gpu;
    float ms = 0;
    vm_status s = run(job); /* the first run may load code */
    CUresult r = g->d->EventRecord(g->tried[0], g->stream);
    for (int i = 0; i < RUNS && !s && !r; i++) s = run(job);
    if (!r) r = g->d->EventRecord(g->tried[1], g->stream);
    if (!r) r = g->d->EventSynchronize(g->tried[1]);
    if (!r) r = g->d->EventElapsedTime(&ms, g->tried[0], g->tried[1]);
    return s || r ? -1 : (double)ms;
}

const vm_device vm_gpu_device = {.align = 256, /* GPU libraries expect it */
                                 .channels_last = true,
                                 .take = take,
                                 .give = give,
                                 .weight_bytes = vm_gpu_weight_bytes,
                                 .set_weight = set_weight,
                                 .get_weight = get_weight,
                                 .start = start,
                                 .finish = finish,
                                 .begin = begin,
                                 .end = end,
                                 .step_enqueued = step_enqueued,
                                 .seconds = seconds,
                                 .send = send,
                                 .fetch = fetch,
                                 .blend = blend,
                                 .error = vm_error};
