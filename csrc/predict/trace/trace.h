/* What a PyTorch call allocates and frees in the caching allocator, in order: storages of tensors, and operators'
 * temporaries, on the eager CUDA path of PyTorch 2.5 and later.
 *
 *   trace.c  the trace, and its operators' temporaries (play.h plays it on a simulated allocator)
 *   offloaded.c  tensors that are there only for some modules' calls
 *   vae.c    the traces of the VAEs, from an architecture (walk.h describes the method)
 *
 * A trace knows shapes, not devices: convolutions are questions, whose workspaces the caller looks up; matrix products
 * are uses of cuBLAS. vaemem/pytorch records the same traces from real modules under fake tensors. */
#ifndef VM_TRACE_H
#define VM_TRACE_H

#include "../sizes.h"
#include "names.h"
#include "../allocator/allocator.h"
#include "sdpa.h"
#include "../../../kernels/cudnn/conv.h"
#include "../../vm.h"

typedef enum vm_trace_op {
    VM_TRACE_TAKE,     /* a storage */
    VM_TRACE_GIVE,     /* the storage `id` loses its last reference */
    VM_TRACE_CONV,     /* the workspace of convolution `id`, allocated and freed */
    VM_TRACE_CUBLAS,   /* cuBLAS: the first use allocates its workspace, which stays */
    VM_TRACE_CUBLASLT, /* cuBLASLt: its own workspace, see vm_trace_blas */
    VM_TRACE_EMPTY     /* torch.cuda.empty_cache */
} vm_trace_op;

typedef struct vm_trace_step {
    vm_trace_op op;
    uint32_t id;     /* of a storage, or of a convolution */
    uint32_t name;   /* by number */
    uint32_t stream; /* of a storage's allocation; 0: PyTorch's own */
    uint64_t bytes;  /* as requested */
} vm_trace_step;

/* Steps that free all they allocate, such as those of a tile. Stretches of one kind have equal steps, apart from the
 * numbers of their storages. */
typedef struct vm_trace_stretch {
    size_t from, until;
    uint32_t kind;
} vm_trace_stretch;

typedef struct vm_trace {
    size_t steps, convs, stretches;
    uint32_t ids; /* storages are numbered from 0, in order of allocation */
    /* Work, saturating at UINT64_MAX: FLOPs (vm_trace_count), the part in fused attentions, bytes read and written
     * (vm_trace_move), and bytes of weights (vm_trace_send). */
    uint64_t flops, attended, moved, sent;
    vm_trace_step *step;
    vm_conv *conv; /* distinct questions */
    vm_names names;
    vm_trace_stretch *stretch; /* in order, not nested */
    uint32_t kinds;            /* of stretches */
    struct vm_trace_vae *walk; /* owned: how to walk the call if its steps depend on the free memory; or NULL */
    size_t shared;             /* users besides the first one */
} vm_trace;

vm_status vm_trace_new(vm_trace **out);
void vm_trace_free(vm_trace *t); /* accepts NULL; only the last user's call frees the trace */
/* Adds a user. Nobody may change a shared trace. Users come and go in one thread at a time. Returns: t. */
vm_trace *vm_trace_share(vm_trace *t);
/* Makes *t a trace that may change: a copy, if somebody shares it. It has no walk any more. */
vm_status vm_trace_own(vm_trace **t);

/* Longer traces are refused, which bounds their memory: 96 MiB of steps. */
enum { VM_TRACE_STEPS = 1 << 22 };

/* VM_EOVERFLOW above VM_TALLOC_LARGEST, which catches every overflowed product of sizes. Names longer than VM_NAME - 1
 * bytes lose their front. */
vm_status vm_trace_take(vm_trace *t, uint64_t bytes, const char *name, uint32_t *id);
/* PyTorch keeps the memory of streams apart. VM_EINVAL from VM_TRACE_STREAMS on. */
enum { VM_TRACE_STREAMS = 64 };
vm_status vm_trace_take_on(vm_trace *t, uint32_t stream, uint64_t bytes, const char *name, uint32_t *id);
vm_status vm_trace_give(vm_trace *t, uint32_t id);
/* Writes "name [what]", or only name if what is ""; keeps as much of the end as a trace keeps of names. */
enum { VM_TRACE_LABEL = 2 * VM_NAME + 4 };
const char *vm_trace_label(char text[VM_TRACE_LABEL], const char *name, const char *what);
/* op: VM_TRACE_CUBLAS or VM_TRACE_CUBLASLT. */
vm_status vm_trace_blas(vm_trace *t, vm_trace_op op, const char *name);
/* Records the steps since `from` as a stretch, if they free all they allocate. */
vm_status vm_trace_note_stretch(vm_trace *t, size_t from);
/* Finds or adds a convolution without a step: *number. */
vm_status vm_trace_question(vm_trace *t, const vm_conv *conv, uint32_t *number);
/* Adds a convolution's step, and counts its FLOPs and bytes. */
vm_status vm_trace_conv(vm_trace *t, const vm_conv *conv, const char *name);
/* Counts the FLOPs of a matrix product; a multiplication and an addition count as two. */
void vm_trace_count(vm_trace *t, uint64_t flops);
/* Counts bytes that an operator reads and writes in the device's memory. Taking a storage counts its bytes twice: it is
 * written, and its operator reads about as much. Operators add only what they move beyond that. */
void vm_trace_move(vm_trace *t, uint64_t bytes);
/* Counts the bytes of a weight that hooks send to the device; accelerate's then empty the cache. */
vm_status vm_trace_send(vm_trace *t, uint64_t bytes, bool empties);

/* ---- tensors that pass through calls (offloaded.c) ---- */

/* VM_BY_NONE: made on the device; VM_BY_ACCELERATE: sent by accelerate's hooks, which empty the cache after each;
 * VM_BY_DIFFUSERS: sent by the hooks of diffusers' group offloading. */
typedef enum vm_sender { VM_BY_NONE, VM_BY_ACCELERATE, VM_BY_DIFFUSERS } vm_sender;

/* A tensor that comes when a module's call begins, and leaves when the call of `until` ends. */
typedef struct vm_passing {
    const char *module, *until, *name; /* borrowed; "": the outermost */
    uint64_t bytes;
    vm_sender by;
    /* row_bytes more for each row of the module's first product, which has row_flops FLOPs a row */
    uint64_t row_bytes, row_flops;
    uint32_t lives; /* it leaves once that many later tensors of the module are there; 0: with `until` */
    /* As of vm_trace_take_on; and whether it comes before its own module's call. Then its name says which module. */
    uint32_t stream, early;
} vm_passing;

typedef struct vm_passings {
    size_t count;
    const vm_passing *item; /* [count], borrowed; sorted by module, and within one in the caller's order */
} vm_passings;

/* One that is there. */
typedef struct vm_there {
    uint32_t id;
    const vm_passing *of;
} vm_there;

typedef struct vm_passage {
    vm_trace *t;
    const vm_passings *of;
    size_t count;
    vm_there *there; /* [count] */
    bool in_order;   /* what leaves at once leaves in the order in which it came; otherwise the last first */
} vm_passage;

/* Both borrowed; free *p with vm_passage_free, also after a failure. */
vm_status vm_passage_new(vm_trace *t, const vm_passings *of, vm_passage *p);
void vm_passage_free(vm_passage *p);
/* Takes what comes with a module's call, under its name in `shown`; gives what leaves at its end. product: FLOPs of its
 * first matrix product, or 0. */
vm_status vm_passage_begin(vm_passage *p, const char *module, const char *shown, uint64_t product);
vm_status vm_passage_end(vm_passage *p, const char *module);

/* A layer's low-rank pair, as peft keeps it. A multiplies the layer's input, and B multiplies that. The product is
 * scaled and added to the layer's output in a new tensor. */
typedef struct vm_companion {
    const char *module;           /* borrowed: the layer's */
    uint64_t rank, rows, columns; /* of the pair; of the layer's weight as a matrix */
} vm_companion;

typedef struct vm_companions {
    size_t count;
    const vm_companion *item; /* [count], borrowed; those of one layer in the order in which they are added */
} vm_companions;

/* Plays a pair after its layer's call. bytes, flops: of the layer's output; conv: its convolution, NULL for a linear
 * layer. *id: the output, then the sum. Weights that pass through "module.lora_A" and "module.lora_B" come and leave.
 */
vm_status vm_companion_play(const vm_companion *of, vm_passage *p, uint64_t bytes, uint64_t flops, const vm_conv *conv,
                            uint32_t *id);

/* A storage whose allocation may have failed: then the call's earlier storages had fitted. */
typedef struct vm_trace_want {
    uint32_t name;
    uint64_t bytes, before; /* as requested; and the call's bytes at that time, rounded as the allocator rounds */
} vm_trace_want;

/* Finds storages whose request is from low to high bytes. segments: compare the segment that PyTorch's native allocator
 * requests from the driver, which its message names. spare: bytes that were reserved but unallocated, or free, at the
 * refusal; with 0 the call must hold more than ever before. *count: how many there are; out: the first of them. */
enum { VM_TRACE_WANTS = 8 };
vm_status vm_trace_wants(const vm_trace *t, uint64_t low, uint64_t high, bool segments, uint64_t spare,
                         vm_trace_want out[VM_TRACE_WANTS], size_t *count);

/* ---- operators with temporaries ---- */

/* Statistics and the two fused parameter vectors of a group norm after its output; mean and rstd live until
 * vm_trace_give. pixels: h*w; with 1 the vectors are not made. */
vm_status vm_trace_norm(vm_trace *t, vm_dtype dtype, uint64_t n, uint64_t c, uint64_t groups, uint64_t pixels,
                        const char *name, uint32_t stats[2]);

/* scaled_dot_product_attention without dropout, by a kernel from vm_sdpa_choose, or the usual one. The output is taken
 * and stays. Temporaries come and go: the kernel's own, a copy of a boolean mask as numbers, and a mask with rows
 * padded to a multiple of 8, if the kernel needs it. The output ends token by token, as modules use it: flash and
 * memory-efficient kernels write it so, cuDNN's writes it as the queries lie, and the math path head by head; what lies
 * head by head is copied. FLOPs are counted. name: of the calling module. */
vm_status vm_trace_attention(vm_trace *t, const vm_sdpa *call, vm_attention_kernel kernel, const vm_trace_gpu *gpu,
                             const char *name, uint32_t *id);

/* ---- the VAEs ---- */

/* Which code runs: coders.c describes each. */
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
    const vm_arch *arch; /* borrowed; a copy from vm_trace_vae_copy owns its own */
    vm_trace_runtime runtime;
    vm_op op;
    vm_dtype dtype;
    vm_dtype first; /* of post_quant_conv, decoder.conv_in and .mid_block, which diffusers' upcast_vae leaves in half */
    uint64_t height, width, batch; /* of the image; multiples of vm_arch_factor */
    uint64_t frames;               /* latent frames; 1 for an image */
    uint64_t tile;                 /* side of a tile in pixels; 0: tiling is off */
    double tile_overlap;           /* diffusers' tile_overlap_factor: the part of a side that tiles share */
    bool slicing;
    int release;         /* diffusers' release, 38 for 0.38 */
    vm_passings passing; /* weights that hooks move for calls of the encoder, the decoder and what they consist of */
    bool channels_last;  /* the filters' memory format: module.to(memory_format=torch.channels_last) */
    bool picture;        /* the input has a picture's strides, those of (N, H, W, C), as diffusers' pipelines give it */
    vm_trace_gpu gpu;
} vm_trace_vae;

/* encode(image) or decode(latents) as the model's method. The caller owns the input, which is not in the trace. The
 * result stays: decode: the image; encode: bfl's latents, or the others' posterior (moments, logvar, std, var).
 * ComfyUI's and Forge's methods read from the host and write to it: the input is in the trace, and nothing stays. */
vm_status vm_trace_vae_build(const vm_trace_vae *vae, vm_trace **out);
/* *out: free it with vm_scratch_free. */
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
