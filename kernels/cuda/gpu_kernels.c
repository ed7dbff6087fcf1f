/* Our kernels' machine code, and its functions for a device and its number type. */
#include <stdio.h>

#include "gpu.h"

#define VM_GPU_FATBIN(NAME, FATBIN) extern const char vm_fatbin_##FATBIN[];
VM_GPU_KERNELS(VM_GPU_FATBIN)
#undef VM_GPU_FATBIN

static const char *const suffix[] = {[VM_F32] = "f32", [VM_F16] = "f16", [VM_BF16] = "bf16"};

/* Gives NULL if the user disabled the kernel, or the device or its machine code lack it: other GPUs do, and so does
 * code that the driver compiled from PTX. With another number of registers, which another nvcc may choose, the kernel
 * would hang. */
static vm_status find_wgmma(const vm_gpu *g, vm_gpu_kernel of, const char *name, int want, CUfunction *out) {
    int registers = 0;
    CUfunction kernel;
    *out = NULL;
    if (g->capability != 90 || g->no_wgmma) return VM_OK;
    const CUresult found = g->d->ModuleGetFunction(&kernel, g->module[of], name);
    if (found == CUDA_ERROR_NOT_FOUND) return VM_OK;
    const vm_status s = vm_driver_check(g->d, found, name);
    if (s) return s;
    VM_TRY(g, FuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel), "asking for a kernel's registers");
    if (registers == want) *out = kernel;
    return VM_OK;
}

/* The kernel of attention for the type and the device. */
static vm_status find_attention(vm_gpu *g) {
    char name[32];
    const char *const type = suffix[g->backend.dtype];
    CUfunction pairs = NULL, *const kernel = &g->kernel[VM_KERNEL_ATTENTION];
    snprintf(name, sizeof name, "vm_attention_%s_pairs", type);
    if (g->backend.dtype != VM_F32) {
        const vm_status s = find_wgmma(g, VM_KERNEL_ATTENTION_WGMMA, name, VM_PAIR_REGISTERS, &pairs);
        if (s) return s;
    }
    g->attention = vm_attention_choose(g->backend.dtype, (size_t)g->shared_max, pairs != NULL);
    if (g->attention.pairs)
        *kernel = pairs;
    else {
        snprintf(name, sizeof name, "vm_attention_%s_%ux%u", type, g->attention.queries, g->attention.keys);
        VM_TRY(g, ModuleGetFunction(kernel, g->module[VM_KERNEL_ATTENTION], name), name);
    }
    VM_TRY(g,
           FuncSetAttribute(*kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                            (int)vm_attention_shared(g->backend.dtype, g->attention, VM_ATTENTION_CHANNELS)),
           "giving attention its shared memory");
    return VM_OK;
}

static vm_status find_conv(vm_gpu *g, const vm_conv_tile *t, bool video, bool fp8, CUfunction *out) {
    char name[48];
    const char *const type = suffix[g->backend.dtype], *const end = video ? "_video" : "";
    if (t->kind >= VM_CONV_WGMMA) {
        snprintf(name, sizeof name, "vm_conv_%s_%s_%u%s", type, fp8 ? "e4m3" : "wgmma", t->outs, end);
        const vm_status s = find_wgmma(g, VM_KERNEL_CONV_WGMMA, name, VM_WGMMA_REGISTERS, out);
        g->wgmma = g->wgmma && *out;
        if (s || !g->wgmma) return s;
    } else {
        snprintf(name, sizeof name, "vm_conv_%s_%ux%u_%u%s", type, t->rows, t->outs, t->stride, end);
        VM_TRY(g, ModuleGetFunction(out, g->module[VM_KERNEL_CONV], name), name);
    }
    VM_TRY(g, FuncSetAttribute(*out, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)t->shared),
           "giving a convolution its shared memory");
    VM_TRY(g,
           FuncSetAttribute(*out, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CU_SHAREDMEM_CARVEOUT_MAX_SHARED),
           "giving a convolution its shared memory");
    return VM_OK;
}

static vm_status find_convs(vm_gpu *g) {
    g->wgmma = g->capability == 90 && !g->no_wgmma;
    for (uint32_t kind = 0; kind < VM_CONV_ALL_KINDS; kind++) {
        const vm_conv_tile t = vm_conv_tile_at(kind, (size_t)g->shared_max);
        if (!t.resident) continue; /* it is not chosen either */
        vm_status s;
        if ((s = find_conv(g, &t, false, false, &g->conv[kind]))) return s;
        if (vm_conv_of_videos(t) && (s = find_conv(g, &t, true, false, &g->conv_video[kind]))) return s;
        if (g->fp8 && kind >= VM_CONV_WGMMA && (s = find_conv(g, &t, false, true, &g->conv_fp8[kind]))) return s;
    }
    return VM_OK;
}

vm_status vm_gpu_load_kernels(vm_gpu *g) {
#define VM_GPU_IMAGE(NAME, FATBIN) vm_fatbin_##FATBIN,
    static const char *const images[] = {VM_GPU_KERNELS(VM_GPU_IMAGE)};
#undef VM_GPU_IMAGE
    char names[VM_KERNEL_ATTENTION][32];
    snprintf(names[VM_KERNEL_LOAD], sizeof *names, "vm_load_%s", suffix[g->backend.dtype]);
    snprintf(names[VM_KERNEL_STORE], sizeof *names, "vm_store_%s", suffix[g->backend.dtype]);
    snprintf(names[VM_KERNEL_MERGE], sizeof *names, "vm_merge");
    snprintf(names[VM_KERNEL_PIXEL_NORM], sizeof *names, "vm_pixel_norm_%s", suffix[g->backend.dtype]);
    snprintf(names[VM_KERNEL_MOVE], sizeof *names, "vm_move_%s", suffix[g->backend.dtype]);
    snprintf(names[VM_KERNEL_BLEND], sizeof *names, "vm_blend");
    for (int i = 0; i < VM_KERNELS_COUNT; i++) {
        const CUresult result = g->d->ModuleLoadData(&g->module[i], images[i]);
        if (result == CUDA_ERROR_NO_BINARY_FOR_GPU || result == CUDA_ERROR_INVALID_IMAGE ||
            result == CUDA_ERROR_INVALID_PTX || result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
            return vm_fail(
                VM_EDEVICE,
                "%s: expected machine code for compute capability %d.%d that a driver for CUDA %d.%d can load, "
                "got what CUDA %d.%d built (VAEMEM_CUDA_ARCHS)",
                g->name, g->capability / 10, g->capability % 10, g->d->version / 1000, g->d->version % 1000 / 10,
                CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10);
        vm_status s = vm_driver_check(g->d, result, "loading kernels");
        if (s) return s;
        if (i < VM_KERNEL_ATTENTION) VM_TRY(g, ModuleGetFunction(&g->kernel[i], g->module[i], names[i]), names[i]);
    }
    const vm_status s = find_attention(g);
    if (s) return s;
    struct {
        CUfunction *to;
        const char *name;
    } frames[] = {
        {&g->gather, "gather"}, {&g->scatter, "scatter"}, {&g->frames_move, "frames_move"}, {&g->turn, "turn"}};
    for (size_t i = 0; i < sizeof frames / sizeof *frames; i++) {
        char name[32];
        snprintf(name, sizeof name, "vm_%s_%s", frames[i].name, suffix[g->backend.dtype]);
        VM_TRY(g, ModuleGetFunction(frames[i].to, g->module[VM_KERNEL_FRAMES], name), name);
    }
    return g->own_conv ? find_convs(g) : VM_OK;
}
