/* Finds, opens and closes a GPU for the process. */
#include "gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- open and close ---- */

/* The unit in which the driver maps memory: 2 MiB on all GPUs so far. MemAlloc's rounding is undocumented. A multiple
 * of this unit leaves no part for others, and takes none from others. */
static vm_status find_granularity(vm_gpu *g) {
    const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = g->device}};
    size_t *const out = &g->backend.granularity;
    const CUresult result = g->d->MemGetAllocationGranularity(out, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result == CUDA_ERROR_NOT_SUPPORTED) *out = 2 << 20; /* a driver that maps no memory on request */
    return result == CUDA_ERROR_NOT_SUPPORTED ? VM_OK : vm_driver_check(g->d, result, "asking for the granularity");
}

static int attribute(const vm_gpu *g, CUdevice_attribute which) {
    int value = 0;
    return g->d->DeviceGetAttribute(&value, which, g->device) ? 0 : value;
}

static vm_status find_device(vm_gpu *g, const vm_gpu_options *o) {
    int count = 0;
    char name[64] = "";
    VM_TRY(g, DeviceGetCount(&count), "counting devices");
    if (o->device < 0 || o->device >= count)
        return vm_fail(VM_EINVAL, VM_EXPECTED("device", "one of %d (cuda:0%s)", "cuda:%d"), count,
                       count > 1 ? " and on" : "", o->device);
    VM_TRY(g, DeviceGet(&g->device, o->device), "finding the device");
    VM_TRY(g, DeviceGetName(name, sizeof name, g->device), "asking the device's name");
    g->capability = 10 * attribute(g, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                    attribute(g, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    g->shared_max = attribute(g, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    g->multiprocessors = attribute(g, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    if (o->tf32 && g->capability < 80)
        return vm_fail(VM_EINVAL,
                       VM_EXPECTED("precision", "a GPU of compute capability 8.0 or later for TF32 (high and medium)",
                                   "%s, which is %d.%d"),
                       name, g->capability / 10, g->capability % 10);
    if (g->capability < 75 || (o->dtype == VM_BF16 && g->capability < 80))
        return vm_fail(VM_EINVAL,
                       VM_EXPECTED("%s", "a GPU of compute capability %s or later for %s", "%s, which is %d.%d"),
                       g->capability < 75 ? "device" : "dtype", o->dtype == VM_BF16 ? "8.0" : "7.5",
                       vm_dtype_name(o->dtype), name, g->capability / 10, g->capability % 10);
    snprintf(g->name, sizeof g->name - sizeof " own", "cuda:%d %s%s", o->device, vm_dtype_name(o->dtype),
             o->tf32  ? " tf32"
             : o->fp8 ? " fp8"
                      : "");
    return VM_OK;
}

static vm_status make_streams(vm_gpu *g) {
    VM_TRY(g, StreamCreate(&g->own, CU_STREAM_NON_BLOCKING), "making a stream");
    VM_TRY(g, StreamCreate(&g->copy, CU_STREAM_NON_BLOCKING), "making a stream");
    CUevent *const events[] = {&g->begun, &g->done, &g->input_free, &g->input_sent, &g->output_ready};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        VM_TRY(g, EventCreate(events[i], CU_EVENT_DISABLE_TIMING), "making an event");
    for (int i = 0; i < VM_GPU_SLOTS; i++)
        VM_TRY(g, EventCreate(&g->slot[i], CU_EVENT_DISABLE_TIMING), "making an event");
    CUevent *const timed[] = {&g->item, &g->tried[0], &g->tried[1]};
    for (size_t i = 0; i < sizeof timed / sizeof *timed; i++)
        VM_TRY(g, EventCreate(timed[i], CU_EVENT_DEFAULT), "making an event");
    for (int i = 0; i < VM_GPU_STEPS; i++) VM_TRY(g, EventCreate(&g->step[i], CU_EVENT_DEFAULT), "making an event");
    for (int i = 0; i < VM_GPU_LAG; i++)
        VM_TRY(g, EventCreate(&g->pace[i], CU_EVENT_DISABLE_TIMING), "making an event");
    CUdeviceptr flags;
    VM_TRY(g, MemAlloc(&flags, 2 * sizeof *g->flags), "taking memory");
    g->flags = (uint32_t *)(uintptr_t)flags;
    VM_TRY(g, MemHostAlloc((void **)&g->pinned, VM_GPU_SLOTS * VM_GPU_SLOT + sizeof(uint32_t), 0),
           "taking pinned memory");
    return VM_OK;
}

static vm_status fill(vm_gpu *g, const vm_gpu_options *o) {
    size_t free = 0;
    VM_ENTER(g);
    vm_status s;
    if ((s = find_granularity(g))) return s;
    if ((s = vm_gpu_watch(g, true, &free))) return s;
    const bool may_own = o->convolution == VM_CONVOLUTION_AUTO && o->dtype != VM_F32 && !o->autotune;
    g->own_conv = o->convolution == VM_CONVOLUTION_OWN || may_own;
    g->no_wgmma = o->no_wgmma;
    if ((s = vm_gpu_load_kernels(g))) return s;
    if (may_own) g->own_conv = g->wgmma;
    if (g->own_conv) strcat(g->name, " own");
    if (o->fp8 && (!g->own_conv || !g->wgmma || o->dtype == VM_F32))
        return vm_fail(
            VM_EINVAL,
            VM_EXPECTED("precision",
                        "highest, or for fp8 a GPU of compute capability 9.0 (H100, H200), dtype bfloat16 "
                        "or float16, and vaemem's own convolution with the kernels that VAEMEM_DISABLE=wgmma "
                        "leaves out",
                        "fp8 with %s"),
            g->name);
    if ((s = make_streams(g))) return s;
    s = vm_cudnn_convs_new(o->libcudnn, NULL, &g->convs);
    if (s && !g->own_conv) return s;
    if (s)
        snprintf(g->no_cudnn, sizeof g->no_cudnn, "%s", vm_error()); /* reported when a pass needs it */
    else
        vm_cudnn_convs_watch(g->convs, vm_gpu_watch, g);
    return vm_gpu_watch(g, false, &free);
}

/* Retains the device's primary context, shared by the whole process. Never released: libraries keep state in it that
 * would not survive. */
static vm_status retain_context(vm_gpu *g, int index) {
    enum { DEVICES = 64 };
    static CUcontext retained[DEVICES];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    if (index >= DEVICES) return vm_fail(VM_EINVAL, VM_EXPECTED("device", "one of the first %d", "%d"), DEVICES, index);
    pthread_mutex_lock(&lock);
    vm_status s = VM_OK;
    if (!retained[index])
        s = vm_driver_check(g->d, g->d->DevicePrimaryCtxRetain(&retained[index], g->device), "opening the device");
    g->context = retained[index];
    pthread_mutex_unlock(&lock);
    return s;
}

vm_status vm_gpu_open(const vm_gpu_options *o, vm_gpu **out) {
    *out = NULL;
    vm_gpu *g = calloc(1, sizeof *g);
    if (!g) return vm_fail(VM_ENOMEM, "device: no %zu bytes of host memory", sizeof *g);
    pthread_mutex_init(&g->copying, NULL);
    g->backend = (vm_backend){.name = g->name,
                              .dtype = o->dtype,
                              .cut = vm_gpu_cut,
                              .needs = vm_gpu_needs,
                              .workspace = vm_gpu_workspace,
                              .run = vm_gpu_run,
                              .prepare = vm_gpu_prepare,
                              .device = &vm_gpu_device,
                              .self = g};
    g->tf32 = o->tf32;
    g->autotune = o->autotune;
    g->fp8 = o->fp8;
    vm_status s;
    if ((s = (g->d = vm_driver_get(o->libcuda)) ? VM_OK : VM_EDEVICE)) goto done;
    if ((s = find_device(g, o))) goto done;
    if ((s = retain_context(g, o->device))) goto done;
    s = fill(g, o);
done:
    if (s)
        vm_gpu_close(g);
    else
        *out = g;
    return s;
}

static void empty(vm_gpu *g) {
    const vm_driver *d = g->d;
    if (!g->context || vm_gpu_enter(g)) return;
    d->CtxSynchronize(); /* the last run may use a caller's stream */
    vm_cudnn_convs_free(g->convs);
    for (int i = 0; i < VM_GPU_GRAPHS; i++)
        if (g->graph[i].exec) d->GraphExecDestroy(g->graph[i].exec);
    for (int i = 0; i < VM_GPU_STEPS; i++)
        if (g->step[i]) d->EventDestroy(g->step[i]);
    for (int i = 0; i < VM_GPU_LAG; i++)
        if (g->pace[i]) d->EventDestroy(g->pace[i]);
    for (int i = 0; i < VM_GPU_SLOTS; i++)
        if (g->slot[i]) d->EventDestroy(g->slot[i]);
    CUevent const events[] = {g->item, g->begun,      g->tried[0],   g->tried[1],
                              g->done, g->input_free, g->input_sent, g->output_ready};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (events[i]) d->EventDestroy(events[i]);
    if (g->pinned) d->MemFreeHost(g->pinned);
    if (g->flags) d->MemFree((CUdeviceptr)(uintptr_t)g->flags);
    if (g->own) d->StreamDestroy(g->own);
    if (g->copy) d->StreamDestroy(g->copy);
    for (int i = 0; i < VM_KERNELS_COUNT; i++)
        if (g->module[i]) d->ModuleUnload(g->module[i]);
    vm_gpu_leave(g);
}

void vm_gpu_close(vm_gpu *g) {
    if (!g) return;
    char error[VM_SENTENCE]; /* closing must not change the error */
    snprintf(error, sizeof error, "%s", vm_error());
    empty(g);
    pthread_mutex_destroy(&g->copying);
    free(g);
    if (strcmp(error, vm_error())) vm_fail(VM_OK, "%s", error);
}
