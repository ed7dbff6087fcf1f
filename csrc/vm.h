/* The core's C API: plain C11, no Python, no intrinsics.
 *
 *   arch.c     what a model is          passes.c   what a run of it does        weights.c  its tensors
 *   model.c    all of these as one object, in a device's memory
 *   chain.c    passes that run together    choose.c   which do    layout.c   where every byte of a run lies, before it
 *   plan.c     all of these for what is asked
 *   run.c      does it on a backend     mem.c      the only allocator           pool.c     the only threads
 *
 * Ownership: whoever calls *_new owns the object and gives it to *_free, which accepts NULL and
 * half-built objects. A pointer argument is borrowed for the call unless its comment says so.
 * Every function that can fail returns vm_status (or NULL) and leaves a sentence in vm_error(). */
#ifndef VM_H
#define VM_H

#include "../kernels/kernels.h"

/* ---- mem.c: every byte that the core takes ---- */

typedef enum vm_category {
    VM_WEIGHTS,
    VM_ACTIVATIONS,
    VM_SCRATCH,
    VM_WORKSPACE, /* a library's own: cuDNN's */
    VM_OUTPUT,
    VM_CATEGORIES
} vm_category;

typedef struct vm_usage {
    size_t live[VM_CATEGORIES]; /* bytes in use now */
    size_t peak[VM_CATEGORIES]; /* bytes in use when their sum was largest since vm_mem_reset_peak */
    size_t reserved;            /* bytes held from the system now: live blocks and the arena */
} vm_usage;

/* An account that blocks are charged to. References are counted, for blocks handed to the user outlive the model.
 * Thread-safe. */
typedef struct vm_mem vm_mem;
/* The process's own account of host memory, for what belongs to no model on the host; it is never given up. */
extern vm_mem *const vm_mem_common;
/* In the memory of the backend's device, borrowed until the account is gone. */
vm_mem *vm_mem_new(const vm_backend *backend);
vm_mem *vm_mem_retain(vm_mem *mem);
void vm_mem_release(vm_mem *mem);
/* Aligned as the device does, and in host memory zeroed. */
vm_status vm_mem_alloc(vm_mem *mem, vm_category category, size_t bytes, void **out);
void vm_mem_free(vm_mem *mem, vm_category category, void *block, size_t bytes);
/* Makes place for one more item behind the `count` that *array holds: vm_mem_capacity(count + 1) items in all. */
vm_status vm_mem_grow(vm_mem *mem, vm_category category, void **array, size_t count, size_t item_bytes);
/* Items that an array grown to `count` has place for: it doubles. */
size_t vm_mem_capacity(size_t count);
/* The same for memory whose use is charged apart: the arena. */
vm_status vm_mem_reserve(vm_mem *mem, size_t bytes, void **out);
void vm_mem_unreserve(vm_mem *mem, void *block, size_t bytes);
void vm_mem_use(vm_mem *mem, vm_category category, size_t bytes);
void vm_mem_unuse(vm_mem *mem, vm_category category, size_t bytes);
/* Scratch of vm_mem_common's, which knows how large it is. An array that grows doubles, as vm_mem_grow makes it. */
vm_status vm_scratch_new(size_t items, size_t item_bytes, void *out);
vm_status vm_scratch_grow(void *array, size_t count, size_t item_bytes);
/* Makes place for `items` items, zeros behind the `count` that *array holds. */
vm_status vm_scratch_widen(void *array, size_t count, size_t items, size_t item_bytes);
void vm_scratch_free(void *scratch); /* accepts NULL */
void vm_mem_reset_peak(vm_mem *mem);
vm_usage vm_mem_usage(vm_mem *mem);
/* Fault injection for tests: the nth allocation from now fails (1 is the next; 0 turns it off). Returns how many were
 * left. */
size_t vm_mem_fail_at(size_t nth);

/* ---- arch.c: the models ---- */

enum { VM_MAX_LEVELS = 8, VM_MAX_LAYERS = 16, VM_MAX_STATISTICS = 128 };

typedef enum vm_op { VM_ENCODE, VM_DECODE, VM_OPS } vm_op;

/* How an autoencoder is built and what its tensors are called. */
typedef enum vm_family {
    VM_KL, /* diffusers' AutoencoderKL and AutoencoderKLFlux2 */
    /* AutoencoderKLQwenImage and AutoencoderKLWan, of one frame: convolutions whose last temporal slice alone meets it,
     * norms of a pixel, upsamplers that halve the channels, images within [-1, 1]; and AutoencoderKLQwenImage21 */
    VM_WAN,
    VM_HUNYUAN_IMAGE, /* AutoencoderKLHunyuanImage: pixel shuffles between levels */
    /* AutoencoderTiny: convolutions and ReLU, one width in a half, latents and no moments; norms in the smallest level
     * of TAEF2 alone (norm_num_groups, else 0); layers_per_block blocks a level, but one in the image's */
    VM_TINY
} vm_family;

/* An autoencoder as its config.json describes it (names are those of AutoencoderKL in diffusers). */
typedef struct vm_arch {
    char name[32]; /* a shipped model's, or "custom" */
    vm_family family;
    size_t in_channels, out_channels, latent_channels;
    size_t levels, block_out_channels[VM_MAX_LEVELS], layers_per_block;
    size_t decoder_block_out_channels[VM_MAX_LEVELS]; /* zeros: as block_out_channels */
    size_t norm_num_groups;                           /* 0 where there are none, or of a pixel */
    float norm_eps;
    bool use_quant_conv, use_post_quant_conv, mid_block_add_attention;
    bool slices;                  /* of VM_WAN: weights have a slice for each of three frames */
    bool residual;                /* of VM_WAN: what a level began with is added to what it ends with */
    bool temporal[VM_MAX_LEVELS]; /* and whether the resampler behind an encoder's level is one of frames too */
    size_t image_patch;           /* of VM_WAN: 2 where 2x2 pixels of an image are one, of four times the channels */
    bool scaling_known;           /* false when the weights cannot tell (sd15 and sdxl have the same tensors) */
    float scaling_factor, shift_factor;
    size_t statistics; /* how many channels have a mean and a deviation below: all latent channels, or none */
    float latents_mean[VM_MAX_STATISTICS], latents_std[VM_MAX_STATISTICS];
    size_t patch_size[2]; /* of the latents that a pipeline normalises by the model's BatchNorm; zeros: it has none */
    float batch_norm_eps;
} vm_arch;

/* NULL-terminated. */
const vm_arch *const *vm_arch_models(void);
vm_status vm_arch_check(const vm_arch *arch);
/* Pixels of an image side per latent pixel: 2^(levels - 1), and as often again as a patch has. */
size_t vm_arch_factor(const vm_arch *arch);
/* What an encoder gives: means and log-variances, or latents alone. */
size_t vm_arch_encoded(const vm_arch *arch);
/* block_out_channels of the half that does `op`. */
const size_t *vm_arch_widths(const vm_arch *arch, vm_op op);

/* ---- passes.c: what a run does, whatever its size ---- */

enum { VM_NAME = 72, VM_NONE = -1 };

/* A tensor of weights as files name it (diffusers' names) and where its one packed copy lies. */
typedef struct vm_tensor {
    char name[VM_NAME];
    size_t dims, shape[5]; /* as in the file: (c), (out, in), (out, in, k, k) or (out, in, frames, k, k); (c, 1, ...) */
    vm_weight weight;
    size_t offset, bytes; /* in the packed copy */
    bool set, rounded;    /* rounded: the packed numbers are not quite those that were set */
} vm_tensor;

/* A pass before its size is known: levels say how often the image side is halved. It makes one tensor, known by the
 * node's index; whose memory that takes is the plan's. */
typedef struct vm_node {
    char name[VM_NAME];
    vm_pass pass;
    int x_level, y_level;
    int x, add;                    /* nodes; VM_NONE for the user's pixels, or no add */
    int weight, bias, gamma, beta; /* tensors of weights; VM_NONE where the pass has none */
} vm_node;

typedef struct vm_graph {
    size_t nodes;
    vm_node *node; /* the last one writes the user's pixels */
} vm_graph;

struct vm_model;
/* Appends to model->graph[op] and registers the tensors that its passes need. */
vm_status vm_passes_build(struct vm_model *model, vm_op op);
/* A multiply-add counts as two. A 3x3 counts as a direct sum, though Winograd's way does fewer, and after nearest 2x as
 * the four 2x2 that it folds into. A move counts a number of the larger tensor as one. */
double vm_pass_flops(const vm_pass *pass);

/* ---- model.c: an architecture with its passes and weights ---- */

enum { VM_ENCODER = 1 << VM_ENCODE, VM_DECODER = 1 << VM_DECODE };

typedef struct vm_model {
    vm_mem *mem;  /* weights, arena and outputs, in the device's memory */
    vm_mem *host; /* what the core keeps of its own: in mem where the device is the host, else in vm_mem_common */
    const vm_backend *backend; /* where the model lives; on the host a run may be given another that lives there too */
    vm_arch arch;
    unsigned parts; /* VM_ENCODER | VM_DECODER */
    vm_graph graph[VM_OPS];
    size_t tensors;
    vm_tensor *tensor;
    void *weights; /* the packed copy */
    size_t weights_bytes;
    void *arena; /* kept between runs */
    size_t arena_bytes;
    struct vm_plan *plan; /* on a GPU: the last run's, kept for an equal request */
} vm_model;

/* backend: on whose device and in whose numbers, borrowed until the model and its outputs are gone. On the host any one
 * of vm_backend_at(dtype, precision, i) stands for all. */
vm_status vm_model_new(const vm_arch *arch, unsigned parts, const vm_backend *backend, vm_model **out);
void vm_model_free(vm_model *model);
/* Gives the arena and the last run's plan back to the system. */
void vm_model_trim(vm_model *model);
void vm_model_trim_arena(vm_model *model);

/* ---- weights.c ---- */

/* Adds a tensor at the end of the packed copy, before it is allocated; its index, or VM_NONE. */
int vm_weights_add(vm_model *model, const char *name, size_t dims, const vm_weight *weight);
const vm_tensor *vm_weights_find(const vm_model *model, const char *name);
/* VM_EINVAL where a tensor was never set. */
vm_status vm_weights_check(const vm_model *model);
/* data: the tensor in its file's layout. */
vm_status vm_weights_set(vm_model *model, size_t tensor, vm_dtype dtype, const void *data);
/* VM_EINVAL where the device keeps weights rounded. */
vm_status vm_weights_get(const vm_model *model, size_t tensor, float *data);

/* ---- chain.c: passes that run together, row by row ---- */

enum { VM_CHAIN = 64 /* passes at most */ };

/* A pass within a chain. */
typedef struct vm_stage {
    vm_cut cut;
    size_t x_rows, y_rows; /* of its tensors */
    int x, add;            /* stages that make them, VM_NONE where they are there from the beginning */
    size_t each, ahead;    /* rows of tiles in one step, at most, and steps whose input may be made beforehand */
    bool active, read;     /* in this round; and by another stage */
    size_t done, now;      /* rows of tiles: before this step, and in it */
} vm_stage;

/* Nodes [first, last] that run together. Tensors that pass between them exist as rings of rows; those that are read
 * later are stored. A round runs the chain as far as a tensor whose sums a norm in it wants, the last all of it. */
typedef struct vm_chain {
    int first, last;
    bool stepped;                   /* row by row; else its one pass runs whole */
    bool tight;                     /* vm_manner.tight, of all its passes */
    size_t steps;                   /* of a round, at most; 0 for any number: rings are then as low as can be */
    size_t live[VM_CATEGORIES];     /* planned bytes in use while it runs */
    size_t measured[VM_CATEGORIES]; /* the same, as mem.c counted them */
    int scratch, workspace;         /* pieces; workspace may be VM_NONE */
} vm_chain;

struct vm_plan;
/* The stages of a chain; how many. */
size_t vm_chain_stages(const struct vm_plan *plan, const vm_chain *chain, vm_stage *stage);
/* The next round's stages are made active, and begin. round: 0 for the first; false after the last. *target: the stage
 * that is only measured, VM_NONE in the last round. */
bool vm_chain_round(const struct vm_plan *plan, int first, vm_stage *stage, size_t stages, size_t round, int *target);
/* Fills now: every stage whose input is ready, and whose rows somebody waits for. false when the round is done. */
bool vm_chain_step(vm_stage *stage, size_t stages);
/* For walking through a round's schedule to learn what memory it takes: how the stages stood some steps ago. */
typedef struct vm_repeats {
    vm_stage mark[VM_CHAIN];
    size_t steps;
} vm_repeats;
/* Call it after each step, with a `seen` that begins as zeros. Once the steps since the mark would only be repeated
 * further down the image, it moves the stages on past all of these repeats but the last. */
void vm_chain_skip(vm_repeats *seen, vm_stage *stage, size_t stages);
/* How a chain has one of its nodes computed. */
vm_manner vm_chain_manner(const struct vm_plan *plan, const vm_chain *chain, int node);
/* What a chain costs in FLOPs, for one batch item: all its rounds, and what vm_cut.cost says. */
double vm_chain_work(const struct vm_plan *plan, const vm_chain *chain);
/* Before row k of tiles: rows of output that a stage has made, and the first row of input that it still reads. */
size_t vm_stage_made(const vm_stage *stage, size_t k);
size_t vm_stage_from(const vm_stage *stage, size_t k);
/* Whether nodes [first, last] can be a chain. */
bool vm_chain_can(const struct vm_plan *plan, int first, int last);
/* FLOPs of all its rounds, of one batch item; where node is not VM_NONE, of that node alone. */
double vm_chain_flops(const struct vm_plan *plan, int first, int last, int node);

/* ---- plan.c, layout.c: every byte of a run, before it ---- */

/* A piece of the arena, from the first chain that needs it to the last. */
typedef struct vm_piece {
    vm_category category;
    int first, last;
    size_t bytes, offset;
    size_t pitch, ring; /* of tensors: blocks of channels in a row, and rows (SIZE_MAX: all) */
    bool placed;        /* offset is known */
    int heir;           /* the piece that its last chain writes over it row behind row, or VM_NONE */
    ptrdiff_t shift;    /* which then begins at offset + shift at the latest */
    size_t shared;      /* of its bytes, those that lie over others in its first chain */
} vm_piece;

/* What a node needs, by index into vm_plan.piece; VM_NONE where it needs none. */
typedef struct vm_step {
    vm_pass pass; /* with its sizes */
    int y, y_stats, prepared;
    size_t y_block; /* where its tensor begins in a row of its piece */
    int last;       /* the last node that reads its tensor */
    bool streamed;
    size_t parts;
    double flops, seconds;
} vm_step;

/* What is asked of a run. */
typedef struct vm_request {
    vm_op op;
    const vm_backend *backend;
    vm_limits limits;            /* stripe_bytes: the planner's choice */
    size_t height, width, batch; /* of the image */
    vm_format in, out;           /* of the user's arrays */
    bool host_arrays;            /* they are in the host's memory, else in the device's */
    bool own_output;             /* the output is this run's, and counted */
    bool scaled;         /* latents are divided by the scaling factor, and shifted, on the way into the decoder */
    bool unclamped;      /* log-variances are stored as they are, for whoever clamps them later */
    float scale;         /* a power of two that float16's activations are kept multiplied by; 0 is 1 */
    size_t memory_limit; /* for all of vm_plan.peak; 0: none, and then the least memory that costs no extra work */
} vm_request;

typedef struct vm_plan {
    vm_request ask;
    size_t in_bytes, out_bytes; /* of one batch item of the user's pixels */
    bool staged;                /* the user's arrays pass through the arena, for the device cannot address them */
    int in, out;                /* their pieces then */
    const vm_graph *graph;
    size_t steps, chains, pieces;
    vm_step *step; /* one a node */
    vm_chain *chain;
    vm_piece *piece;
    bool ample; /* no pass that is a chain of its own runs in steps, since these cost time */
    bool wide; /* tensors may lie side by side in the rows of one piece, which then lives as long as the last of them */
    size_t arena_bytes, pool_bytes, plan_bytes;
    size_t own_bytes;           /* pool_bytes + plan_bytes where they count as the run's scratch: on the host; else 0 */
    size_t peak[VM_CATEGORIES]; /* when their sum is largest */
    double work;                /* FLOPs, relative to those of every pass once */
    size_t reserved;            /* weights + arena + output, each as it is held, + what the run itself needs */
    size_t rows;                /* of progress, the whole batch */
} vm_plan;

/* VM_ELIMIT where no plan keeps within ask->memory_limit; *out is then a plan in name only, whose `reserved` is the
 * smallest limit that would do.
 * Needs nothing of the model that a run changes, so a model may be planned for while it runs. */
vm_status vm_plan_new(const vm_model *model, const vm_request *ask, vm_plan **out);
void vm_plan_free(const vm_model *model, vm_plan *plan);
/* As vm_plan_new, but returns the plan that the model keeps if the request is equal: planning takes some ms. On success
 * the model keeps no plan any more, and the caller owns *out. */
vm_status vm_plan_for_run(vm_model *model, const vm_request *ask, vm_plan **out);
/* Takes the plan that vm_plan_for_run returned, for the next run. On the host it is freed at once: all that the model
 * keeps there counts against the next run's limit, and a run takes much longer than its plan. */
void vm_plan_keep(vm_model *model, vm_plan *plan);

/* ---- pool.c ---- */

/* Called by the thread that started the run, at most about 20 times a second; true asks to stop. */
typedef bool (*vm_poll)(void *context, size_t rows_done, size_t rows_total);

typedef struct vm_pool vm_pool;
/* Seconds of a clock that only goes forward. */
double vm_now(void);
size_t vm_pool_bytes(unsigned threads);
/* pool: vm_pool_bytes, zeroed. On failure nothing is left to close. */
vm_status vm_pool_open(vm_pool *pool, unsigned threads, size_t rows_total, vm_poll poll, void *poll_context);
void vm_pool_close(vm_pool *pool);
vm_status vm_pool_each(void *pool, size_t n, size_t rows, vm_task fn, const void *job);

/* ---- run.c ---- */

typedef struct vm_run {
    vm_numbers in; /* the user's pixels, borrowed; a device's may be part of an image, or packed: row 0 */
    void *out;     /* NULL: taken by the run, the caller's on success (vm_mem_unreserve gives it back) */
    void *stream;  /* of a device: the caller's, or NULL */
    bool wait;     /* false: returns when all is enqueued; neither poll nor overflow then */
    bool replay;   /* enqueue an item's passes as one graph, kept for the next run of its kind, where a device can */
    vm_poll poll;  /* may be NULL */
    void *poll_context;
    bool check; /* for tests: poison what a pass must not read, verify what it must not write */

    /* what it leaves */
    vm_mem *out_mem; /* where out was taken from, out_bytes of it; NULL where the caller gave out */
    size_t out_bytes;
    bool overflow;              /* a stored number was not finite, where the device looks */
    size_t peak[VM_CATEGORIES]; /* bytes in use when their sum was largest */
    size_t reserved;            /* bytes held from the system for it, as vm_plan.reserved counts them */
} vm_run;

/* Fills the steps' measured bytes and seconds. On failure the arena is given back. */
vm_status vm_plan_run(vm_model *model, vm_plan *plan, vm_run *run);

#endif
