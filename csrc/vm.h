/* The core's C API: plain C11, no Python, no intrinsics.
 *
 *   arch.c     describes models         passes.c   lists the passes of a run     weights.c  holds the tensors
 *   model.c    joins these three into one object, in a device's memory
 *   chain.c    passes that run together    choose.c   picks the chains    layout.c   places every byte before the run
 *   plan.c     turns a request into a plan
 *   flow.c     runs a chain's tasks as soon as their rows are there
 *   run.c      runs it on a backend     mem.c      the only allocator            threads.c  the only threads
 *
 * Ownership: whoever calls *_new owns the object and gives it to *_free, which accepts NULL and half-built objects. A
 * function borrows a pointer argument for the call unless its comment says otherwise. Every function that can fail
 * returns vm_status (or NULL) and leaves a sentence in vm_error(). */
#ifndef VM_H
#define VM_H

#include "../kernels/kernels.h"

/* ---- mem.c: every byte that the core allocates ---- */

typedef enum vm_category {
    VM_WEIGHTS,
    VM_ACTIVATIONS,
    VM_SCRATCH,
    VM_WORKSPACE, /* cuDNN's own */
    VM_OUTPUT,
    VM_CATEGORIES
} vm_category;

typedef struct vm_usage {
    size_t live[VM_CATEGORIES]; /* bytes in use now */
    size_t peak[VM_CATEGORIES]; /* bytes in use when their sum was largest since vm_mem_reset_peak */
    size_t reserved;            /* bytes held from the system now: live blocks and the arena */
} vm_usage;

/* An account that blocks are charged to. Reference counted: a user's blocks may outlive the model. Thread-safe. */
typedef struct vm_mem vm_mem;
/* The process's account of host memory that belongs to no model on the host. Never freed. */
extern vm_mem *const vm_mem_common;
/* An account of the device's memory. Borrows the backend until the account is freed. */
vm_mem *vm_mem_new(const vm_backend *backend);
vm_mem *vm_mem_retain(vm_mem *mem);
void vm_mem_release(vm_mem *mem);
/* Aligned as the device requires. Host memory is zeroed. */
vm_status vm_mem_alloc(vm_mem *mem, vm_category category, size_t bytes, void **out);
void vm_mem_free(vm_mem *mem, vm_category category, void *block, size_t bytes);
/* Makes room for one more item after the `count` items of *array: vm_mem_capacity(count + 1) items in all. */
vm_status vm_mem_grow(vm_mem *mem, vm_category category, void **array, size_t count, size_t item_bytes);
/* Returns: how many items fit into an array that grew to `count`; it doubles. */
size_t vm_mem_capacity(size_t count);
/* The same for memory whose use is charged separately: the arena. */
vm_status vm_mem_reserve(vm_mem *mem, size_t bytes, void **out);
void vm_mem_unreserve(vm_mem *mem, void *block, size_t bytes);
void vm_mem_use(vm_mem *mem, vm_category category, size_t bytes);
void vm_mem_unuse(vm_mem *mem, vm_category category, size_t bytes);
/* Scratch from vm_mem_common; each block stores its own size. Grown arrays double. */
vm_status vm_scratch_new(size_t items, size_t item_bytes, void *out);
vm_status vm_scratch_grow(void *array, size_t count, size_t item_bytes);
/* Makes room for `items` items; those after the first `count` are zeros. */
vm_status vm_scratch_widen(void *array, size_t count, size_t items, size_t item_bytes);
void vm_scratch_free(void *scratch); /* accepts NULL */
void vm_mem_reset_peak(vm_mem *mem);
vm_usage vm_mem_usage(vm_mem *mem);
/* Fault injection for tests: the nth allocation from now fails (1 is the next; 0 turns it off).
 * Returns: how many allocations were still to go. */
size_t vm_mem_fail_at(size_t nth);

/* ---- arch.c: the models ---- */

enum { VM_MAX_LEVELS = 8, VM_MAX_LAYERS = 16, VM_MAX_STATISTICS = 128 };
enum { VM_MAX_SIDE = 1 << 20 }; /* pixels of an image; products of two sides then fit into 64 bits with room to spare */

typedef enum vm_op { VM_ENCODE, VM_DECODE, VM_OPS } vm_op;

/* How an autoencoder is built and how its tensors are named. */
typedef enum vm_family {
    VM_KL, /* diffusers' AutoencoderKL and AutoencoderKLFlux2 */
    /* AutoencoderKLQwenImage, AutoencoderKLQwenImage21 and AutoencoderKLWan. Pixel norms; upsamplers halve the
     * channels; images within [-1, 1]. Of one frame: only the last temporal slice of a convolution meets it */
    VM_WAN,
    VM_HUNYUAN_IMAGE, /* AutoencoderKLHunyuanImage: pixel shuffles between levels */
    /* AutoencoderTiny: convolutions and ReLU, one width per half, latents without moments. Only the smallest level of
     * TAEF2 has norms (norm_num_groups, otherwise 0). Levels have layers_per_block blocks, the image's has 1 */
    VM_TINY,
    /* AutoencoderKLLTX2Video, of videos only. Norms without weights; every resampler is a pixel shuffle, of time too;
     * an image comes as patches of 4x4 pixels; beyond its ends a video repeats its first and its last frame */
    VM_LTX
} vm_family;

/* What a resampler of VM_LTX does: halves or doubles the sides, the number of frames, or both. */
enum { VM_SPACE = 1, VM_TIME = 2 };

/* An autoencoder as its config.json describes it (names are those of AutoencoderKL in diffusers). */
typedef struct vm_arch {
    char name[32]; /* a shipped model's, or "custom" */
    vm_family family;
    size_t in_channels, out_channels, latent_channels;
    size_t levels, block_out_channels[VM_MAX_LEVELS], layers_per_block;
    size_t decoder_block_out_channels[VM_MAX_LEVELS]; /* zeros: as block_out_channels */
    size_t norm_num_groups;                           /* 0: no norms, or pixel norms */
    float norm_eps;
    bool use_quant_conv, use_post_quant_conv, mid_block_add_attention;
    bool slices;                  /* VM_WAN: weights have a slice for each of three frames */
    bool videos;                  /* and all are kept, with the convolutions over time, so that videos can be run */
    bool residual;                /* VM_WAN: a level's input is added to its output */
    bool temporal[VM_MAX_LEVELS]; /* and whether the resampler after an encoder's level also resamples frames */
    size_t image_patch;           /* VM_WAN: 2 if 2x2 pixels of an image become one with four times the channels */
    struct vm_half {              /* VM_LTX: of a half; lists are in the order of diffusers' config */
        size_t layers[VM_MAX_LEVELS + 1];  /* of each block, then of the middle one */
        uint8_t resamplers[VM_MAX_LEVELS]; /* VM_SPACE, VM_TIME or both; 0: none */
        size_t factor[VM_MAX_LEVELS];      /* of the decoder: by which a block's channels are divided */
        bool added[VM_MAX_LEVELS];         /* of the decoder: whether a resampler's input is added to its output */
        bool causal;                       /* a frame meets the two before it, otherwise one before and one after it */
        bool mirrored;                     /* beyond its borders a picture is mirrored, otherwise zero */
    } half[VM_OPS];
    bool scaling_known; /* false when the weights cannot tell (sd15 and sdxl have the same tensors) */
    float scaling_factor, shift_factor;
    size_t statistics; /* how many channels have a mean and a deviation below: all latent channels, or 0 */
    float latents_mean[VM_MAX_STATISTICS], latents_std[VM_MAX_STATISTICS];
    size_t patch_size[2]; /* of latents that a pipeline normalises by the model's BatchNorm; zeros: no BatchNorm */
    float batch_norm_eps;
} vm_arch;

/* Returns: a NULL-terminated list. */
const vm_arch *const *vm_arch_models(void);
vm_status vm_arch_check(const vm_arch *arch);
/* Returns: how many blocks the half that does `op` has besides the middle one: arch->levels, or fewer in VM_LTX's
 * decoder. */
size_t vm_arch_levels(const vm_arch *arch, vm_op op);
/* Returns: image pixels per latent pixel along a side. */
size_t vm_arch_factor(const vm_arch *arch);
/* Returns: how often the number of a video's frames is halved; 0: the model runs images only. */
size_t vm_arch_halvings(const vm_arch *arch);
/* Returns: whether the resampler after an encoder's level also resamples frames, if the model is of videos. */
bool vm_arch_is_temporal(const vm_arch *arch, size_t level);
/* Returns: channels of an encoder's output: means and log-variances, or latents only. */
size_t vm_arch_encoded(const vm_arch *arch);
/* block_out_channels of the half that does `op`. */
const size_t *vm_arch_widths(const vm_arch *arch, vm_op op);

/* ---- passes.c: the passes of a run, at any size ---- */

enum { VM_NAME = 72, VM_NONE = -1 };

/* A tensor of weights: its name in files (diffusers' names) and the place of its one packed copy. */
typedef struct vm_tensor {
    char name[VM_NAME];
    size_t dims, shape[5]; /* as in the file: (c), (out, in), (out, in, k, k) or (out, in, frames, k, k); (c, 1, ...) */
    vm_weight weight;
    size_t offset, bytes; /* in the packed copy */
    bool set, rounded;    /* rounded: packing rounded the numbers */
} vm_tensor;

/* A pass before its size is known. Levels say how often the image side is halved, times how often the number of frames
 * is. A node makes one tensor, known by the node's index; the plan places it. */
typedef struct vm_node {
    char name[VM_NAME];
    vm_pass pass;
    int x_level, y_level, x_time, y_time;
    int x, add;                    /* nodes; VM_NONE: the user's pixels, or no add */
    int weight, bias, gamma, beta; /* tensors of weights; VM_NONE: the pass has none */
} vm_node;

typedef struct vm_graph {
    size_t nodes;
    vm_node *node; /* the last one writes the user's pixels */
} vm_graph;

struct vm_model;
/* Appends to model->graph[op], or to model->video[op], and registers the tensors that its passes need. */
vm_status vm_passes_build(struct vm_model *model, vm_op op, bool video);
/* Returns: whether images are videos of a frame: LTX's, and on a GPU, where filters are stored for one of the two. */
bool vm_passes_are_of_videos(const struct vm_model *model);
/* Returns: the passes that encode or decode videos of this many frames. */
const vm_graph *vm_passes_of(const struct vm_model *model, vm_op op, size_t frames);
/* Returns: FLOPs; a multiply-add counts as two. A 3x3 counts as a direct sum, though Winograd's way needs fewer; after
 * nearest 2x it counts as its four 2x2 filters. A move counts one per number of the larger tensor. */
double vm_pass_flops(const vm_pass *pass);

/* ---- model.c: an architecture with its passes and weights ---- */

enum { VM_ENCODER = 1 << VM_ENCODE, VM_DECODER = 1 << VM_DECODE };

typedef struct vm_model {
    vm_mem *mem;               /* weights, arena and outputs, in the device's memory */
    vm_mem *host;              /* the core's own tables: mem if the device is the host, otherwise vm_mem_common */
    const vm_backend *backend; /* where the model lives; on the host a run may name another host backend */
    vm_arch arch;
    unsigned parts;                        /* VM_ENCODER | VM_DECODER */
    vm_graph graph[VM_OPS], video[VM_OPS]; /* of images and, if arch.videos, of several frames */
    size_t tensors;
    vm_tensor *tensor;
    void *weights; /* the packed copy */
    size_t weights_bytes;
    void *arena; /* kept between runs */
    size_t arena_bytes;
    struct vm_plan *plan; /* on a GPU: the last run's plan, kept for an equal request */
} vm_model;

/* backend: the device and its number format; borrowed until the model and its outputs are freed. On the host any one of
 * vm_backend_at(dtype, precision, i) stands for all. */
vm_status vm_model_new(const vm_arch *arch, unsigned parts, const vm_backend *backend, vm_model **out);
void vm_model_free(vm_model *model);
/* Frees the arena and the last run's plan. */
void vm_model_trim(vm_model *model);
void vm_model_trim_arena(vm_model *model);

/* ---- weights.c ---- */

/* Adds a tensor at the end of the packed copy, before that is allocated. Returns: its index, or VM_NONE. */
int vm_weights_add(vm_model *model, const char *name, size_t dims, const vm_weight *weight);
const vm_tensor *vm_weights_find(const vm_model *model, const char *name);
/* VM_EINVAL if a tensor was never set. */
vm_status vm_weights_check(const vm_model *model);
/* data: the tensor in its file's layout. */
vm_status vm_weights_set(vm_model *model, size_t tensor, vm_dtype dtype, const void *data);
/* VM_EINVAL if the device keeps rounded weights. */
vm_status vm_weights_get(const vm_model *model, size_t tensor, float *data);

/* ---- chain.c: passes that run together, row by row ---- */

enum { VM_CHAIN = 64 /* passes at most */ };

/* A pass within a chain. */
typedef struct vm_stage {
    vm_cut cut;
    size_t x_rows, y_rows; /* rows of its tensors */
    int x, add;            /* stages that make them; VM_NONE: they exist from the beginning */
    size_t least, most;    /* rows of tiles per step in any round, at least and at most */
    size_t each, ahead;    /* most rows of tiles per step, and steps whose input may be made in advance */
    bool active, read;     /* in this round; read: by another stage */
    size_t done, now;      /* rows of tiles before this step, and in it */
} vm_stage;

/* Nodes [first, last] that run together. A tensor read only within the chain is a ring of rows; one read later is
 * stored. A round runs the chain up to a tensor whose sums a norm of the chain needs; the last round runs all of it. */
typedef struct vm_chain {
    int first, last;
    bool stepped;                   /* row by row; otherwise its one pass runs whole */
    bool tight;                     /* vm_manner.tight, for all its passes */
    size_t steps;                   /* most steps per round; 0: no limit, and rings are as low as possible */
    size_t live[VM_CATEGORIES];     /* planned bytes in use while it runs */
    size_t measured[VM_CATEGORIES]; /* the same, as mem.c counted them */
    int scratch, workspace;         /* pieces; workspace may be VM_NONE */
} vm_chain;

struct vm_plan;
/* Fills the stages of a chain. Returns: how many. */
size_t vm_chain_stages(const struct vm_plan *plan, const vm_chain *chain, vm_stage *stage);
/* Activates and begins the next round's stages. round: 0 for the first. *target: the stage that is only measured,
 * VM_NONE in the last round. Returns: false after the last round. */
bool vm_chain_round(const struct vm_plan *plan, int first, vm_stage *stage, size_t stages, size_t round, int *target);
/* Fills `now` of every stage with its input and a waiting reader. Returns: false when the round is done. */
bool vm_chain_step(vm_stage *stage, size_t stages);
/* For walking through a round's schedule to learn how much memory it takes: the stages as they were some steps ago. */
typedef struct vm_repeats {
    vm_stage mark[VM_CHAIN];
    size_t steps;
} vm_repeats;
/* Call it after each step; `seen` begins as zeros. Once the steps since the mark would only repeat further down the
 * image, it moves the stages past all repeats but the last. */
void vm_chain_skip(vm_repeats *seen, vm_stage *stage, size_t stages);
/* Returns: how a chain computes one of its nodes. */
vm_manner vm_chain_manner(const struct vm_plan *plan, const vm_chain *chain, int node);
/* Returns: FLOPs of a chain for one batch item: all its rounds, plus vm_cut.cost. */
double vm_chain_work(const struct vm_plan *plan, const vm_chain *chain);
/* Before row k of tiles. Returns: rows of output made so far; first row of input still needed. */
size_t vm_stage_made(const vm_stage *stage, size_t k);
size_t vm_stage_from(const vm_stage *stage, size_t k);
/* Returns: whether the rows that row k of tiles of `s` reads are done. */
bool vm_stage_ready(const vm_stage *stage, const vm_stage *s, size_t k);
/* Whether nodes [first, last] can be a chain. */
bool vm_chain_can(const struct vm_plan *plan, int first, int last);
/* Returns: FLOPs of all its rounds for one batch item; of `node` only, unless that is VM_NONE. */
double vm_chain_flops(const struct vm_plan *plan, int first, int last, int node);

/* ---- flow.c ---- */

/* Runs a round of a chain whose tiles are tasks. stage: as vm_chain_round left it. */
vm_status vm_flow_run(const struct vm_plan *plan, const vm_chain *chain, const vm_stage *stage, const vm_tasks *tasks,
                      size_t stages, const vm_exec *exec);

/* ---- plan.c, layout.c: every byte of a run, before it runs ---- */

/* A piece of the arena, from the first chain that needs it to the last. */
typedef struct vm_piece {
    vm_category category;
    int first, last;
    size_t bytes, offset;
    size_t pitch, ring; /* of tensors: blocks of channels per row, and rows (SIZE_MAX: all) */
    int nth;            /* index of the piece that is placed at this piece's place in the order */
    int heir;           /* the piece that its last chain writes over it, one row after another, or VM_NONE */
    ptrdiff_t shift;    /* the heir begins at offset + shift at the latest */
    size_t shared;      /* bytes of it that lie over other pieces in its first chain */
} vm_piece;

/* What a node needs, by index into vm_plan.piece; VM_NONE: it needs none. */
typedef struct vm_step {
    vm_pass pass; /* with its sizes */
    int y, y_stats, prepared;
    size_t y_block; /* where its tensor begins within a row of its piece */
    int last;       /* the last node that reads its tensor */
    bool streamed;
    size_t parts;
    double flops, seconds;
} vm_step;

/* A run's options. */
typedef struct vm_request {
    vm_op op;
    const vm_backend *backend;
    vm_limits limits;            /* stripe_bytes: chosen by the planner */
    size_t height, width, batch; /* of the image */
    size_t frames;               /* of a video; 0 or 1: images */
    vm_format in, out;           /* of the user's arrays */
    bool host_arrays;            /* the arrays are in the host's memory, otherwise in the device's */
    bool own_output;             /* the output is allocated for this run, and counts */
    bool scaled;                 /* decoder: divide latents by the scaling factor, and shift them */
    bool unclamped;              /* store log-variances unclamped, for a caller that clamps them later */
    float scale;                 /* power of two that float16's activations stay multiplied by; 0 means 1 */
    size_t memory_limit; /* limit for all of vm_plan.peak; 0: no limit, and the least memory without extra work */
} vm_request;

typedef struct vm_plan {
    vm_request request;
    size_t in_bytes, out_bytes; /* of one batch item of the user's pixels */
    bool staged;                /* the user's arrays pass through the arena: the device cannot address them */
    int in, out;                /* pieces of the staged arrays */
    const vm_graph *graph;
    size_t steps, chains, pieces;
    vm_step *step; /* one per node */
    vm_chain *chain;
    vm_piece *piece;
    bool ample; /* no pass that is its own chain runs in steps: steps cost time */
    bool wide;  /* tensors may share the rows of one piece, which lives as long as the last of them */
    size_t arena_bytes, pool_bytes, plan_bytes;
    size_t own_bytes;           /* pool_bytes + plan_bytes on the host, where they count as scratch; otherwise 0 */
    size_t peak[VM_CATEGORIES]; /* when their sum is largest */
    double work;                /* FLOPs, relative to running every pass once */
    size_t reserved;            /* weights + arena + output, as held, + the run's own needs */
    size_t rows;                /* rows of progress, for the whole batch */
} vm_plan;

/* VM_ELIMIT if no plan keeps within request->memory_limit. *out then is no usable plan: its `reserved` is the smallest
 * limit that would do.
 * Reads nothing of the model that a run changes, so planning may happen during a run. */
vm_status vm_plan_new(const vm_model *model, const vm_request *request, vm_plan **out);
void vm_plan_free(const vm_model *model, vm_plan *plan);
/* As vm_plan_new, but returns the model's kept plan if its request is equal: planning takes some ms. On success the
 * model keeps no plan, and the caller owns *out. */
vm_status vm_plan_for_run(vm_model *model, const vm_request *request, vm_plan **out);
/* Takes back a plan from vm_plan_for_run for the next run; transfers. On the host it is freed at once: memory that the
 * model keeps there counts against the next run's limit, and planning is short compared with a run. */
void vm_plan_keep(vm_model *model, vm_plan *plan);

/* ---- threads.c ---- */

/* Called by the thread that started the run, at most about 20 times a second. Returns: true to stop the run. */
typedef bool (*vm_poll)(void *context, size_t rows_done, size_t rows_total);

typedef struct vm_pool vm_pool;
/* Returns: seconds on a monotonic clock. */
double vm_now(void);
size_t vm_pool_bytes(unsigned threads);
/* pool: vm_pool_bytes bytes of zeros. After a failure there is nothing to close. */
vm_status vm_pool_open(vm_pool *pool, unsigned threads, size_t rows_total, vm_poll poll, void *poll_context);
void vm_pool_close(vm_pool *pool);
vm_status vm_pool_each(void *pool, size_t n, size_t rows, vm_task fn, const void *job);

/* ---- run.c ---- */

typedef struct vm_run {
    vm_numbers in; /* the user's pixels, borrowed. On a device they may be part of an image, or packed: row 0 */
    void *out;     /* NULL: the run allocates it and transfers it on success (free with vm_mem_unreserve) */
    void *stream;  /* a device's stream, the caller's, or NULL */
    bool wait;     /* false: return once everything is enqueued, without poll or overflow check */
    bool replay;   /* enqueue an item's passes as one graph, kept for the next run like it, if the device can */
    vm_poll poll;  /* may be NULL */
    void *poll_context;
    bool check; /* for tests: poison what a pass must not read, check what it must not write */

    /* results */
    vm_mem *out_mem; /* account that `out` came from, out_bytes of it; NULL if the caller gave `out` */
    size_t out_bytes;
    bool overflow;              /* a stored number was not finite, if the device checks */
    size_t peak[VM_CATEGORIES]; /* bytes in use when their sum was largest */
    size_t reserved;            /* bytes held from the system for the run, counted as in vm_plan.reserved */
} vm_run;

/* Fills the steps' measured bytes and seconds. Frees the arena on failure. */
vm_status vm_plan_run(vm_model *model, vm_plan *plan, vm_run *run);

#endif
