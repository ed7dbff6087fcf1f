/* One GPU that computes in one number type. Shared by the files of this folder. */
#ifndef VM_GPU_H
#define VM_GPU_H

#include <pthread.h>

#include "conv_cudnn.h"
#include "cuda.h"
#include "driver.h"

enum {
    VM_GPU_STEPS = 256,   /* timed passes of a batch item */
    VM_GPU_LAG = 8,       /* passes, or steps of a chain, that the host enqueues ahead in a run that it waits for */
    VM_GPU_GRAPHS = 8,    /* graphs kept for replay */
    VM_GPU_NODES = 4096,  /* most kernels in a graph; longer runs are enqueued one by one each time */
    VM_GPU_SLOTS = 2,     /* pieces of pinned memory: the host copies one while the GPU copies the other */
    VM_GPU_SLOT = 4 << 20 /* bytes of each */
};

/* The fat binaries. Each contains one kernel for the type and the device; attention and conv have one per shape. */
#define VM_GPU_KERNELS(X)               \
    X(LOAD, load)                       \
    X(STORE, store)                     \
    X(MERGE, norm)                      \
    X(PIXEL_NORM, pixel_norm)           \
    X(MOVE, move)                       \
    X(BLEND, blend)                     \
    X(ATTENTION, attention)             \
    X(ATTENTION_WGMMA, attention_wgmma) \
    X(CONV, conv)                       \
    X(CONV_WGMMA, conv_wgmma)           \
    X(FRAMES, frames)
typedef enum vm_gpu_kernel {
#define VM_GPU_KERNEL(NAME, FATBIN) VM_KERNEL_##NAME,
    VM_GPU_KERNELS(VM_GPU_KERNEL)
#undef VM_GPU_KERNEL
        VM_KERNELS_COUNT
} vm_gpu_kernel;

typedef struct vm_graph_entry {
    uint64_t key, used; /* used: last use, by graph_clock; 0: the entry is empty */
    CUgraphExec exec;   /* NULL: ran once, pass by pass, and is captured the next time */
    size_t nodes;       /* launches of the previous run */
} vm_graph_entry;

typedef struct vm_gpu {
    vm_backend backend; /* the core's view; self points here */
    char name[96];
    const vm_driver *d;
    CUdevice device;
    CUcontext context; /* the device's primary one, shared by the whole process */
    int capability, shared_max, multiprocessors;
    bool tf32, autotune, fp8;
    vm_cudnn_convs *convs;
    CUmodule module[VM_KERNELS_COUNT];
    CUfunction kernel[VM_KERNELS_COUNT], gather, scatter, frames_move, turn; /* the last four: of frames.cu */
    vm_attention_shape attention;
    bool own_conv; /* our own convolution instead of cuDNN's wherever it has a tile */
    bool no_wgmma; /* as vm_gpu_options */
    bool wgmma;    /* the device and its machine code have conv_wgmma.cu's kernels */
    /* Its kernels, for images and for videos, if the device has room for their tiles. */
    CUfunction conv[VM_CONV_ALL_KINDS], conv_video[VM_CONV_ALL_KINDS];
    CUfunction conv_fp8[VM_CONV_ALL_KINDS]; /* with fp8, conv_wgmma.cu's */
    size_t fp8_weights;                     /* tensors of e4m3 so far */
    char no_cudnn[512];                     /* why convs is NULL */

    CUstream own, copy, stream; /* stream: of the current run, `own` or the caller's */
    CUevent begun, done;        /* the beginning of the current run, the end of the last one */
    CUevent item;               /* at the first pass of a batch item */
    CUevent tried[2];           /* around the convolutions timed by vm_gpu_time */
    CUevent input_free, input_sent, output_ready, slot[VM_GPU_SLOTS];
    CUevent step[VM_GPU_STEPS], pace[VM_GPU_LAG];
    size_t paced;            /* how often pace was recorded in this run */
    uint32_t *flags;         /* on the device: bit 0: a stored number was not finite; then vm_merge's count of blocks */
    char *pinned;            /* VM_GPU_SLOTS slots, then one word for the flags */
    pthread_mutex_t copying; /* held while the slots are used */
    size_t next_slot;

    CUstream outside; /* while passes are captured on `own`: the run's stream, which will launch the graph */
    vm_graph_entry graph[VM_GPU_GRAPHS];
    uint64_t graph_clock;
    size_t launches; /* since an item's first launch */

    /* Device memory by differences of free memory (vm_gpu_watch): bytes used by kernels, libraries and graphs, and the
     * most that one graph used. */
    _Atomic ptrdiff_t unaccounted;
    size_t graph_most;
} vm_gpu;

/* Which convolution to use. AUTO: our own in half precision if conv_wgmma.cu's kernels are available, unless cuDNN's is
 * timed; otherwise cuDNN's. */
typedef enum vm_convolution { VM_CONVOLUTION_AUTO, VM_CONVOLUTION_CUDNN, VM_CONVOLUTION_OWN } vm_convolution;

typedef struct vm_gpu_options {
    int device;
    vm_dtype dtype;
    bool tf32, autotune;
    bool fp8; /* multiplies e4m3 wherever vm_pass.fp8 allows it */
    vm_convolution convolution;
    bool no_wgmma;                  /* the kernels of every device on compute capability 9.0 too */
    const char *libcuda, *libcudnn; /* NULL: search */
} vm_gpu_options;

/* VM_EINVAL: no such device, or a type that it lacks. VM_EDEVICE: no driver, no cuDNN, or no machine code for it. */
vm_status vm_gpu_open(const vm_gpu_options *options, vm_gpu **out);
void vm_gpu_close(vm_gpu *gpu);
vm_status vm_gpu_memory(vm_gpu *gpu, size_t *free, size_t *total);
/* A vm_conv_watch: counts allocations between two calls. gpu: a vm_gpu. */
vm_status vm_gpu_watch(void *gpu, bool begin, size_t *free);
/* Returns: bytes that graphs still to be captured may take, estimated from the largest so far. */
size_t vm_gpu_to_come(const vm_gpu *gpu);
/* Orders work enqueued on `stream` from now on after the last run. */
vm_status vm_gpu_order(vm_gpu *gpu, void *stream);
/* VM_EINVAL if the stream is being captured: a run cannot be part of another graph. */
vm_status vm_gpu_check_stream(vm_gpu *gpu, void *stream);
/* Waits for the last run, then copies; `to` is the host's. */
vm_status vm_gpu_read(vm_gpu *gpu, void *to, const void *from, size_t bytes);
/* Around every use of the driver: the calling thread may have any context, and gets it back. */
static inline vm_status vm_gpu_enter(const vm_gpu *gpu) {
    return vm_driver_check(gpu->d, gpu->d->CtxPushCurrent(gpu->context), "entering the device's context");
}
static inline void vm_gpu_leave(const vm_gpu *gpu) {
    CUcontext left;
    gpu->d->CtxPopCurrent(&left);
}

/* Both at once, for functions that return a vm_status: enters, and leaves at every return. */
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

/* Returns from the calling function if the driver call fails. */
#define VM_TRY(G, CALL, DOING)                                         \
    do {                                                               \
        vm_status try_ = vm_driver_check((G)->d, (G)->d->CALL, DOING); \
        if (try_) return try_;                                         \
    } while (0)

/* launch.c, for backend.c and frames.c. */
vm_status vm_gpu_launch(vm_gpu *g, CUfunction kernel, size_t x, size_t y, size_t threads, size_t shared, void *args);
/* Returns: where the rows of a view lie; the first that is needed is `first`. */
vm_ring_rows vm_gpu_ring(const vm_view *view, size_t first);
/* Fills the factors of rows [first, end) of x, and scale, with shift behind it. */
vm_status vm_gpu_pixel_norm(vm_gpu *g, const vm_pass *pass, const vm_operands *at, float *factor, float *scale,
                            size_t first, size_t end);
vm_status vm_gpu_attention(vm_gpu *g, const vm_pass *pass, const vm_operands *at);
/* frames.c: the same as backend.c's functions, for passes of videos. */
vm_cut vm_frames_cut(const vm_gpu *g, const vm_pass *pass, bool tight);
vm_needs vm_frames_needs(const vm_gpu *g, const vm_pass *pass, vm_manner manner);
/* Returns: whether cuDNN has a convolution to do. */
bool vm_frames_key(const vm_gpu *g, const vm_pass *pass, vm_manner manner, vm_conv_key *key);
/* Before the first rows. */
vm_status vm_frames_begin(vm_gpu *g, const vm_pass *pass, const vm_operands *at);
/* Rows [row, end) of y. */
vm_status vm_frames_rows(vm_gpu *g, const vm_pass *pass, const vm_operands *at, size_t row, size_t end);
vm_status vm_frames_attention(vm_gpu *g, const vm_pass *pass, const vm_operands *at);

/* backend.c: a pass enqueued on gpu->stream. */
vm_cut vm_gpu_cut(const vm_backend *b, const vm_pass *pass, bool tight);
vm_needs vm_gpu_needs(const vm_backend *b, const vm_pass *pass, const vm_limits *limits, vm_manner manner);
vm_status vm_gpu_workspace(const vm_backend *b, const vm_pass *pass, const vm_limits *limits, vm_manner manner,
                           size_t *bytes);
vm_status vm_gpu_prepare(const vm_backend *b, const vm_pass *pass, const vm_operands *at, const vm_exec *exec,
                         vm_tasks *out);
vm_status vm_gpu_run(const vm_backend *b, const vm_pass *pass, const vm_operands *at, const vm_exec *exec);
/* Returns: whether filters of `outs` outputs and `in` inputs, both padded, are stored in blocks (cuda.h). */
static inline bool vm_gpu_blocked(const vm_gpu *g, size_t ksize, size_t in, size_t outs) {
    return g->wgmma && vm_conv_is_blocked(ksize, in, outs);
}
/* Returns: whether such filters are e4m3, in blocks: those of images that vm_pass.fp8 allows. */
static inline bool vm_gpu_fp8(const vm_gpu *g, bool allowed, size_t ksize, size_t in, size_t outs) {
    return g->fp8 && allowed && vm_gpu_blocked(g, ksize, in, outs);
}
/* Returns: bytes of blocks of e4m3; the scales of `outs` filters follow. */
static inline size_t vm_gpu_fp8_bytes(size_t outs, size_t in, size_t taps) {
    return 2 * vm_conv_blocked(1, outs, in / 2, taps);
}
/* weights_cuda.c: a file's tensor in the passes' layout, in the GPU's type. */
size_t vm_gpu_weight_bytes(const vm_backend *b, const vm_weight *w);
/* out: vm_gpu_weight_bytes. data: in the file's layout and type. VM_EINVAL if a number is not finite in the GPU's
 * type. */
vm_status vm_gpu_pack_weight(const vm_backend *b, const vm_weight *w, void *out, vm_dtype dtype, const void *data);
/* Returns: channels of tensors and weights on a GPU. */
static inline size_t vm_padded(size_t c) { return VM_ROUND_UP(c, VM_BLOCK); }

#endif
