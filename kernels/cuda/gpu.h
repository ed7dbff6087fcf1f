/* One GPU that computes in one type of numbers: what gpu.c, gpu_kernels.c, gpu_device.c and backend.c share. */
#ifndef VM_GPU_H
#define VM_GPU_H

#include <pthread.h>

#include "conv_cudnn.h"
#include "cuda.h"
#include "driver.h"

enum {
    VM_GPU_STEPS = 256,   /* passes of a batch item that are timed */
    VM_GPU_LAG = 8,       /* passes, or steps of a chain, that the host enqueues ahead of the GPU in a run that it
                           * waits for */
    VM_GPU_GRAPHS = 8,    /* graphs kept for replay */
    VM_GPU_NODES = 4096,  /* kernels in one of them, at most; more are enqueued one by one each time */
    VM_GPU_SLOTS = 2,     /* pieces of pinned memory: the host copies one while the GPU copies the other */
    VM_GPU_SLOT = 4 << 20 /* bytes of each */
};

/* The fat binaries, each with the one kernel in it that fits the type and the device. conv's has a kernel for each
 * tile. */
#define VM_GPU_KERNELS(X)     \
    X(LOAD, load)             \
    X(STORE, store)           \
    X(MERGE, norm)            \
    X(PIXEL_NORM, pixel_norm) \
    X(MOVE, move)             \
    X(ATTENTION, attention)   \
    X(BLEND, blend)           \
    X(CONV, conv)             \
    X(CONV_WGMMA, conv_wgmma)
typedef enum vm_gpu_kernel {
#define VM_GPU_KERNEL(NAME, FATBIN) VM_KERNEL_##NAME,
    VM_GPU_KERNELS(VM_GPU_KERNEL)
#undef VM_GPU_KERNEL
        VM_KERNELS_COUNT
} vm_gpu_kernel;

typedef struct vm_graph_entry {
    uint64_t key, used; /* used: when, by graph_clock; 0: the entry is empty */
    CUgraphExec exec;   /* NULL: it has been run once, pass by pass, and is captured the next time */
    size_t nodes;       /* launches of the run before */
} vm_graph_entry;

typedef struct vm_gpu {
    vm_backend backend; /* what the core sees; self points here */
    char name[96];
    const vm_driver *d;
    CUdevice device;
    CUcontext context; /* the device's primary one, shared with everyone in the process */
    int capability, shared_max, multiprocessors;
    bool tf32, autotune;
    vm_cudnn_convs *convs;
    CUmodule module[VM_KERNELS_COUNT];
    CUfunction kernel[VM_KERNELS_COUNT];
    vm_attention_shape attention;
    bool own_conv;                      /* our own convolution wherever it has a tile, instead of cuDNN's */
    bool wgmma;                         /* the device and its machine code have conv_wgmma.cu's kernel */
    CUfunction conv[VM_CONV_ALL_KINDS]; /* its kernels, where the device has room for their tiles */
    char no_cudnn[512];                 /* why convs is NULL */

    CUstream own, copy, stream; /* stream: where the current run is enqueued, `own` or the caller's */
    CUevent begun, done;        /* the beginning of the current run, the end of the last one */
    CUevent item;               /* where the first pass of a batch item begins */
    CUevent tried[2];           /* around the convolutions that vm_gpu_time times */
    CUevent input_free, input_sent, output_ready, slot[VM_GPU_SLOTS];
    CUevent step[VM_GPU_STEPS], pace[VM_GPU_LAG];
    size_t paced;    /* how often pace was recorded in this run */
    uint32_t *flags; /* on the device: bit 0 where a stored number was not finite; then vm_merge's count of blocks */
    char *pinned;    /* VM_GPU_SLOTS slots, then one word for the flags */
    pthread_mutex_t copying; /* held while the slots are used */
    size_t next_slot;

    CUstream outside; /* while passes are captured on `own`: the run's stream, where the graph will be launched */
    vm_graph_entry graph[VM_GPU_GRAPHS];
    uint64_t graph_clock;
    size_t launches; /* since an item's first */

    /* Bytes of the device, by what was free before and after (vm_gpu_watch): those that went to kernels, libraries and
     * graphs, and the most that went to one graph. */
    _Atomic ptrdiff_t unaccounted;
    size_t graph_most;
} vm_gpu;

/* Whose convolution. AUTO: our own in half precision where conv_wgmma.cu's kernel is there, unless cuDNN's is to be
 * timed; otherwise cuDNN's. */
typedef enum vm_convolution { VM_CONVOLUTION_AUTO, VM_CONVOLUTION_CUDNN, VM_CONVOLUTION_OWN } vm_convolution;

typedef struct vm_gpu_options {
    int device;
    vm_dtype dtype;
    bool tf32, autotune;
    vm_convolution convolution;
    const char *libcuda, *libcudnn; /* NULL: where they are found */
} vm_gpu_options;

/* VM_EINVAL: no such device, a type it has not. VM_EDEVICE: no driver, no cuDNN, no machine code for it. */
vm_status vm_gpu_open(const vm_gpu_options *options, vm_gpu **out);
void vm_gpu_close(vm_gpu *gpu);
vm_status vm_gpu_memory(vm_gpu *gpu, size_t *free, size_t *total);
/* A vm_conv_watch: counts what is taken between two calls. gpu: a vm_gpu. */
vm_status vm_gpu_watch(void *gpu, bool begin, size_t *free);
/* What graphs that are still to be captured may take, by the largest so far. */
size_t vm_gpu_to_come(const vm_gpu *gpu);
/* What is enqueued on `stream` from now on comes after the last run. */
vm_status vm_gpu_order(vm_gpu *gpu, void *stream);
/* VM_EINVAL where the stream is being captured: a run cannot be part of somebody else's graph. */
vm_status vm_gpu_check_stream(vm_gpu *gpu, void *stream);
/* Waits for the last run, then copies; `to` is the host's. */
vm_status vm_gpu_read(vm_gpu *gpu, void *to, const void *from, size_t bytes);
/* Around every use of the driver: the calling thread may have any context, and has it again after. */
static inline vm_status vm_gpu_enter(const vm_gpu *gpu) {
    return vm_driver_check(gpu->d, gpu->d->CtxPushCurrent(gpu->context), "entering the device's context");
}
static inline void vm_gpu_leave(const vm_gpu *gpu) {
    CUcontext left;
    gpu->d->CtxPopCurrent(&left);
}

/* Both at once, for functions that return a vm_status: enters, and leaves wherever the function returns. */
#define VM_ENTER(G)                                                             \
    const vm_gpu *entered_ __attribute__((cleanup(vm_gpu_leave_scope))) = NULL; \
    do {                                                                        \
        vm_status enter_ = vm_gpu_enter(G);                                     \
        if (enter_) return enter_;                                              \
        entered_ = (G);                                                         \
    } while (0)
static inline void vm_gpu_leave_scope(const vm_gpu **gpu) {
    if (*gpu) vm_gpu_leave(*gpu);
}

/* gpu_kernels.c, inside vm_gpu_enter. VM_EDEVICE: no machine code for the device. */
vm_status vm_gpu_load_kernels(vm_gpu *gpu);

/* gpu_device.c */
extern const vm_device vm_gpu_device;
/* A vm_conv_timer: milliseconds on the GPU, context a vm_gpu. */
double vm_gpu_time(void *gpu, vm_status (*run)(void *job), void *job);

/* Returns from the calling function where the driver refuses. */
#define VM_TRY(G, CALL, DOING)                                         \
    do {                                                               \
        vm_status try_ = vm_driver_check((G)->d, (G)->d->CALL, DOING); \
        if (try_) return try_;                                         \
    } while (0)

/* backend.c: a pass enqueued on gpu->stream. */
vm_cut vm_gpu_cut(const vm_backend *b, const vm_pass *pass, bool tight);
vm_needs vm_gpu_needs(const vm_backend *b, const vm_pass *pass, const vm_limits *limits, vm_manner manner);
vm_status vm_gpu_workspace(const vm_backend *b, const vm_pass *pass, const vm_limits *limits, vm_manner manner,
                           size_t *bytes);
vm_status vm_gpu_prepare(const vm_backend *b, const vm_pass *pass, const vm_operands *at, const vm_exec *exec,
                         vm_tasks *out);
vm_status vm_gpu_run(const vm_backend *b, const vm_pass *pass, const vm_operands *at, const vm_exec *exec);
/* Whether filters of so many outs and channels in, both padded, lie in blocks (cuda.h). */
static inline bool vm_gpu_blocked(const vm_gpu *g, size_t ksize, size_t in, size_t outs) {
    return g->wgmma && vm_conv_is_blocked(ksize, in, outs);
}
/* weights_cuda.c: a tensor of a file as the passes want it, in the GPU's type. */
size_t vm_gpu_weight_bytes(const vm_backend *b, const vm_weight *w);
/* out: vm_gpu_weight_bytes. data: in the file's layout and type. VM_EINVAL where a number is not finite, or not in the
 * GPU's type. */
vm_status vm_gpu_pack_weight(const vm_backend *b, const vm_weight *w, void *out, vm_dtype dtype, const void *data);
/* Channels as tensors and weights have them on a GPU. */
static inline size_t vm_padded(size_t c) { return VM_ROUND_UP(c, VM_BLOCK); }

#endif
