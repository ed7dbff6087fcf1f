/* What a PyTorch call takes from the caching allocator and gives back, in order: tensors (their storages) and what
 * operators take besides, on the eager CUDA path of PyTorch 2.5 and later.
 *
 *   torch_trace.c  the trace, and its operators' temporaries (process.h plays it on a simulated allocator)
 *   torch_vae.c    the traces of the VAEs, from an architecture (torch_walk.h says how they are made)
 *
 * A trace knows shapes, not devices: convolutions stand in it as questions (whose workspaces the caller looks up) and
 * matrix products as uses of cuBLAS. vaemem/pytorch records the same traces from real modules under fake tensors. */
#ifndef VM_TORCH_TRACE_H
#define VM_TORCH_TRACE_H

#include "sizes.h"
#include "torch_names.h"
#include "torch_alloc.h"
#include "torch_sdpa.h"
#include "../../kernels/cudnn/conv.h"
#include "../vm.h"

typedef enum vm_trace_op {
    VM_TRACE_TAKE,     /* a storage */
    VM_TRACE_GIVE,     /* the storage `id`: its last reference went */
    VM_TRACE_CONV,     /* the workspace of convolution `id`, taken and given back */
    VM_TRACE_CUBLAS,   /* cuBLAS: its workspace is taken by the first use and kept */
    VM_TRACE_CUBLASLT, /* cuBLASLt: a workspace of its own, see vm_trace_blas */
    VM_TRACE_EMPTY,    /* torch.cuda.empty_cache */
    VM_TRACE_NOTHING   /* what a process undid (process.h) */
} vm_trace_op;

typedef struct vm_trace_step {
    vm_trace_op op;
    uint32_t id;    /* of a storage, or of a convolution */
    uint32_t name;  /* by number */
    uint64_t bytes; /* as requested */
} vm_trace_step;

/* Steps that give back all that they take, as those of a tile do. Stretches of a kind have the same steps, but for the
 * numbers of their storages. */
typedef struct vm_trace_stretch {
    size_t from, until;
    uint32_t kind;
} vm_trace_stretch;

typedef struct vm_trace {
    size_t steps, convs, stretches;
    uint32_t ids; /* storages are numbered from 0, in the order in which they are taken */
    /* What was counted, UINT64_MAX for so much or more: FLOPs (vm_trace_count), those of them that are of fused
     * attentions, bytes that are read and written (vm_trace_move), and bytes of weights (vm_trace_send). */
    uint64_t flops, attended, moved, sent;
    vm_trace_step *step;
    vm_conv *conv; /* each question once */
    vm_names names;
    vm_trace_stretch *stretch;  /* in their order, none within another */
    uint32_t kinds;             /* of stretches */
    struct vm_trace_vae *again; /* owned: how to walk the call again if its steps depend on the free memory; or NULL */
} vm_trace;

vm_status vm_trace_new(vm_trace **out);
void vm_trace_free(vm_trace *t); /* accepts NULL */

/* A trace of more steps is refused, and so its memory is bounded: 96 MiB of steps. */
enum { VM_TRACE_STEPS = 1 << 22 };

/* VM_EOVERFLOW over VM_TALLOC_LARGEST, as every product of sizes is that did not fit. Names over VM_NAME - 1 bytes lose
 * their front. */
vm_status vm_trace_take(vm_trace *t, uint64_t bytes, const char *name, uint32_t *id);
vm_status vm_trace_give(vm_trace *t, uint32_t id);
/* "name [what]", or name alone where what is "": as much of its end as a trace keeps of names. */
enum { VM_TRACE_LABEL = 2 * VM_NAME + 4 };
const char *vm_trace_label(char text[VM_TRACE_LABEL], const char *name, const char *what);
/* op: VM_TRACE_CUBLAS or VM_TRACE_CUBLASLT. */
vm_status vm_trace_blas(vm_trace *t, vm_trace_op op, const char *name);
vm_status vm_trace_empty_cache(vm_trace *t);
/* Notes that the steps since `from` are a stretch, if they are one. */
vm_status vm_trace_note_stretch(vm_trace *t, size_t from);
/* The convolution's number, without a step. */
vm_status vm_trace_question(vm_trace *t, const vm_conv *conv, uint32_t *number);
/* Counts the convolution's FLOPs and bytes. */
vm_status vm_trace_conv(vm_trace *t, const vm_conv *conv, const char *name);
/* FLOPs of a matrix product; a multiplication and an addition count as two. */
void vm_trace_count(vm_trace *t, uint64_t flops);
/* Bytes that an operator reads and writes of the device's memory. Every storage that is taken counts twice of itself:
 * it is written, and what makes it reads about as much. Operators add what they read or write beside. */
void vm_trace_move(vm_trace *t, uint64_t bytes);
/* A weight that one of accelerate's hooks moves to the device for a submodule's call: the cache is emptied after it. */
vm_status vm_trace_send(vm_trace *t, uint64_t bytes, const char *name, uint32_t *id);

/* A storage that may be refused: everything that the call took before it fitted. */
typedef struct vm_trace_want {
    uint32_t name;
    uint64_t bytes, before; /* as requested; and what the call has then, rounded as the allocator rounds */
} vm_trace_want;

/* The first of those whose request is from low to high bytes; with `segments` the segment that PyTorch's native
 * allocator asks the driver for, which is what its message names. spare: bytes that were reserved but unallocated, or
 * free, when it was refused; with 0 the call has more than ever before. Returns how many there are. */
enum { VM_TRACE_WANTS = 8 };
vm_status vm_trace_wants(const vm_trace *t, uint64_t low, uint64_t high, bool segments, uint64_t spare,
                         vm_trace_want out[VM_TRACE_WANTS], size_t *count);

/* ---- operators that take more than they return ---- */

/* Statistics and the two fused parameter vectors of a group norm whose output was just taken; mean and rstd live on
 * until vm_trace_give. pixels: h*w; with 1 the vectors are not made. */
vm_status vm_trace_norm(vm_trace *t, vm_dtype dtype, uint64_t n, uint64_t c, uint64_t groups, uint64_t pixels,
                        const char *name, uint32_t stats[2]);

typedef struct vm_trace_gpu {
    int sm; /* compute capability, 89 for 8.9 */
    int multiprocessors;
    uint64_t free_bytes; /* of its memory when the call begins; 0: without end */
} vm_trace_gpu;

/* scaled_dot_product_attention without dropout, by a kernel that vm_sdpa_choose chose, or the usual one. Of cuDNN's
 * nothing is counted, and *id stays. The output is taken and stays; what the kernel takes besides comes and goes, and
 * so do a copy of a boolean mask as numbers, and one with rows padded to a multiple of 8, where the kernel wants that.
 * In the end the output lies token by token, as modules go on with it: fused kernels write it so, and the math path's
 * is copied. FLOPs are counted. name: of the module that calls it. */
vm_status vm_trace_attention(vm_trace *t, const vm_sdpa *call, vm_attention_kernel kernel, const vm_trace_gpu *gpu,
                             const char *name, uint32_t *id);

/* ---- the VAEs ---- */

/* Whose code runs: torch_coders.c says what that is. */
typedef enum vm_trace_runtime {
    VM_TORCH_DIFFUSERS,
    VM_TORCH_BFL,
    VM_TORCH_COMFYUI,
    VM_TORCH_A1111,
    VM_TORCH_FORGE,
    VM_TORCH_RUNTIMES
} vm_trace_runtime;
extern const char *const vm_trace_runtime_name[VM_TORCH_RUNTIMES];

typedef struct vm_trace_vae {
    const vm_arch *arch; /* borrowed; a copy that vm_trace_vae_copy makes owns its own */
    vm_trace_runtime runtime;
    vm_op op;
    vm_dtype dtype, first; /* first: of post_quant_conv, decoder.conv_in and decoder.mid_block, in which diffusers'
                                    upcast_vae keeps half precision; the same as dtype elsewhere */
    uint64_t height, width, batch; /* of the image; multiples of vm_arch_factor */
    uint64_t tile;                 /* side of a tile in pixels; 0: tiling is off */
    double tile_overlap; /* diffusers' tile_overlap_factor, the part of its side that tiles share; others' is fixed */
    bool slicing;
    int release;        /* 38 of diffusers 0.38, whose class runs one frame of a video's VAE (torch_frames.c) */
    bool sends;         /* accelerate's hooks (cpu_offload) send each submodule's weights for its call */
    bool channels_last; /* the filters' memory format: module.to(memory_format=torch.channels_last) */
    vm_trace_gpu gpu;
} vm_trace_vae;

/* encode(image) or decode(latents) as the model's method; the input is the caller's and not in the trace. What stays:
 * decode: the image; encode: bfl's latents, or the others' posterior (moments, logvar, std, var). ComfyUI's and
 * Forge's methods take from the host and give to it: the input is in the trace, and nothing stays. */
vm_status vm_trace_vae_build(const vm_trace_vae *vae, vm_trace **out);
/* *out: to be freed by vm_scratch_free. */
vm_status vm_trace_vae_copy(const vm_trace_vae *vae, vm_trace_vae **out);

/* A parameter or a buffer. */
typedef struct vm_parameter {
    char name[VM_NAME];
    int dims;
    uint64_t shape[5]; /* [dims] */
    bool integer;      /* 64 bits in any dtype */
} vm_parameter;

typedef struct vm_parameters {
    size_t count;
    vm_parameter *item;
} vm_parameters;

/* The parameters in the order in which Module.to moves them. */
vm_status vm_trace_vae_parameters(const vm_arch *arch, vm_trace_runtime runtime, vm_parameters **out);
void vm_parameters_free(vm_parameters *p); /* accepts NULL */

#endif
