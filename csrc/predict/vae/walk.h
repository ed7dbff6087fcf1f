/* Walks through the Python frames of a VAE's module: takes each tensor when a statement makes it, and gives it back
 * when its last reference goes.
 *
 *   walk.h       tensors and operators
 *   attention_block.c  the attention blocks
 *   halves.c     encoders and decoders as lists of modules
 *   coders.c     the other blocks of AutoencoderKL
 *   vae_frames.c     frames of VAEs that are made for videos
 *   tiny.c       tiny autoencoders
 *   tiled_vae.c  AutoencoderKL's encoder and decoder tile by tile, as in A1111's extension
 *   vae.c        the methods around them, tiles and slices
 *   parameters.c    their parameters, in the order in which Module.to moves them
 *
 * Functions named after modules return the output and leave the input to the caller. Errors stick in walk.status. */
#ifndef VM_WALK_H
#define VM_WALK_H

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../trace/trace.h"

enum { EXTERNAL = UINT32_MAX }; /* the id of the caller's input */

/* CHANNELS_LAST_ONE: dense in channels-last order, batch 1, but with strides that PyTorch does not recognise as
 * channels_last (the batch's is too small). Group norms and convolutions copy it; interpolation returns NCHW.
 * BY_FRAME: all channels of a frame before the next frame. */
typedef enum layout { CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_ONE, BY_FRAME } layout;

typedef struct tensor {
    uint32_t id;
    uint64_t n, c, h, w;
    layout layout;
    bool slice;     /* a view that is not dense: an operator that needs a dense tensor copies it */
    uint64_t bytes; /* of its storage */
} tensor;

typedef struct frames frames;

typedef struct walk {
    vm_trace *t;
    const vm_trace_vae *vae;
    const frames *frames; /* of vae->runtime */
    vm_dtype dtype;       /* of the running module, and of the tensors it makes */
    uint64_t live;        /* bytes of the tensors taken */
    vm_passage through;
    vm_status status;
} walk;

typedef struct path {
    char text[2 * VM_NAME];
} path;

__attribute__((format(printf, 2, 3))) static inline path at(path parent, const char *format, ...) {
    const size_t length = strlen(parent.text);
    va_list args;
    va_start(args, format);
    vsnprintf(parent.text + length, sizeof parent.text - length, format, args);
    va_end(args);
    return parent;
}

/* ---- tensors ---- */

static inline uint64_t element(const walk *w) { return vm_dtype_bytes(w->dtype); }

static inline tensor take_sized(walk *w, uint64_t n, uint64_t c, uint64_t h, uint64_t x, layout layout,
                                uint64_t element, path name) {
    tensor y = {.id = EXTERNAL, .n = n, .c = c, .h = h, .w = x, .layout = layout};
    y.bytes = VM_PRODUCT64(n, c, h, x, element);
    if (!w->status) w->status = vm_trace_take(w->t, y.bytes, name.text, &y.id);
    if (!w->status) w->live += y.bytes;
    return y;
}

static inline tensor take(walk *w, uint64_t n, uint64_t c, uint64_t h, uint64_t x, layout layout, path name) {
    return take_sized(w, n, c, h, x, layout, element(w), name);
}

/* One channel or one pixel: dense in either format. */
static inline bool either(const tensor *x) { return x->c == 1 || x->h * x->w == 1; }

static inline tensor take_like(walk *w, const tensor *x, path name) {
    return take(w, x->n, x->c, x->h, x->w, either(x) ? CONTIGUOUS : x->layout, name);
}

static inline void give(walk *w, const tensor *x) {
    if (w->status || x->id == EXTERNAL) return;
    w->status = vm_trace_give(w->t, x->id);
    w->live -= x->bytes;
}

/* Binds the Python name *x to y; the tensor of that name loses its last reference. */
static inline void bind(walk *w, tensor *x, tensor y) {
    give(w, x);
    *x = y;
}

/* x.contiguous(memory_format): a new tensor, or x itself. */
static inline tensor dense(walk *w, const tensor *x, bool nhwc, path name) {
    if (!x->slice && (either(x) || (x->layout != CONTIGUOUS) == nhwc)) return *x;
    return take(w, x->n, x->c, x->h, x->w, nhwc ? CHANNELS_LAST : CONTIGUOUS, at(name, " [contiguous]"));
}

static inline tensor contiguous(walk *w, const tensor *x, path name) { return dense(w, x, false, name); }

static inline void give_copy(walk *w, const tensor *copy, const tensor *of) {
    if (copy->id != of->id) give(w, copy);
}

static inline bool is_wan(const walk *w) { return w->vae->arch->family == VM_WAN; }

/* ---- weights ---- */

/* Begins and ends a module's call, for whose time hooks may send weights. */
static inline void begin(walk *w, path name) {
    if (!w->status) w->status = vm_passage_begin(&w->through, name.text, name.text, 0);
}

static inline void end(walk *w, path name) {
    if (!w->status) w->status = vm_passage_end(&w->through, name.text);
}

/* ---- operators ---- */

static inline tensor conv(walk *w, const tensor *x, uint64_t k, uint64_t side, uint64_t stride, uint64_t padding,
                          path name) {
    const bool of_input = x->layout == CHANNELS_LAST;
    const bool of_filter =
        w->vae->channels_last && x->c * side > 1; /* a filter with one number per output channel has no format */
    const bool nhwc = of_input || of_filter;
    begin(w, name);
    const tensor in = dense(w, x, nhwc, name);
    if (!w->status && VM_MIN(x->h, x->w) + 2 * padding < side)
        w->status =
            vm_fail(VM_EINVAL,
                    VM_EXPECTED("%s", "a tile that leaves a convolution %" PRIu64 " pixels", "%" PRIu64 " x %" PRIu64),
                    name.text, side, x->h, x->w);
    if (w->status) return *x;
    const uint64_t h = (x->h + 2 * padding - side) / stride + 1, wide = (x->w + 2 * padding - side) / stride + 1;
    const tensor y = take(w, x->n, k, h, wide, nhwc ? CHANNELS_LAST : CONTIGUOUS, name);
    uint32_t filter = EXTERNAL;
    if (!w->status && nhwc && !of_filter && side > 1 && x->c > 1) /* others are dense in both formats */
        w->status =
            vm_trace_take(w->t, VM_PRODUCT64(k, x->c, side, side, element(w)), at(name, " [filter]").text, &filter);
    const int64_t shape[4] = {(int64_t)x->n, (int64_t)x->c, (int64_t)x->h, (int64_t)x->w};
    vm_conv question = vm_conv_square(w->dtype, shape, (int64_t)k, (int64_t)side, (int64_t)stride, (int64_t)padding);
    question.tf32 = true;
    question.nhwc = nhwc;
    if (!w->status) w->status = vm_trace_conv(w->t, &question, at(name, " [workspace]").text);
    if (!w->status && filter != EXTERNAL) w->status = vm_trace_give(w->t, filter);
    give_copy(w, &in, x);
    end(w, name);
    return y;
}

static inline tensor conv3(walk *w, const tensor *x, uint64_t k, path name) { return conv(w, x, k, 3, 1, 1, name); }
static inline tensor conv1(walk *w, const tensor *x, uint64_t k, path name) { return conv(w, x, k, 1, 1, 0, name); }

static inline tensor norm(walk *w, const tensor *x, path name) {
    begin(w, name);
    const tensor in = contiguous(w, x, name);
    const tensor y = take(w, x->n, x->c, x->h, x->w, CONTIGUOUS, name);
    uint32_t stats[2];
    if (!w->status)
        w->status = vm_trace_norm(w->t, w->dtype, x->n, x->c, w->vae->arch->norm_num_groups, VM_PRODUCT64(x->h, x->w),
                                  at(name, " [statistics]").text, stats);
    give_copy(w, &in, x);
    for (int i = 0; !w->status && i < 2; i++) w->status = vm_trace_give(w->t, stats[i]);
    end(w, name);
    return y;
}

/* A product of `rows` x `depth` numbers with `depth` x `cols`. */
static inline void blas(walk *w, vm_trace_op op, uint64_t rows, uint64_t depth, uint64_t cols, path name) {
    if (!w->status) w->status = vm_trace_blas(w->t, op, name.text);
    vm_trace_count(w->t, VM_PRODUCT64(2, rows, depth, cols));
}

/* ---- differences between runtimes ---- */

typedef enum activation { SILU, SILU_IN_PLACE, SIGMOID_PRODUCT } activation; /* F.silu(x), or x * sigmoid(x) */

/* Which quant convolutions a model may have. */
typedef enum quant { QUANT_ANY, QUANT_NONE, QUANT_BOTH, QUANT_EVEN } quant;

struct frames {
    bool
        diffusers; /* diffusers' divisions by scale factors, contiguous copies, and callers that hold a level's input */
    bool lists;    /* the encoder keeps all its tensors in a list until it returns */
    bool rolls;    /* names for parts of a video keep the encoder's last level and the decoder's upsampled input */
    bool draws;    /* encode draws latents from the posterior; otherwise they are its mean, a view */
    bool packs;    /* it reads and writes FLUX.2's latents with 2x2 pixels in the channels, normalised */
    activation resnet, last;
    tensor (*attention)(walk *w, const tensor *x, path name);
    quant quant;
};

/* By vm_trace_runtime. */
extern const frames vm_walk_frames[VM_TORCH_RUNTIMES];

tensor vm_walk_attention_diffusers(walk *w, const tensor *x, path name);
/* BFL's: scaled_dot_product_attention. */
tensor vm_walk_attention_bfl(walk *w, const tensor *x, path name);
/* ComfyUI's: the same in a function whose caller keeps queries, keys and values. */
tensor vm_walk_attention_comfyui(walk *w, const tensor *x, path name);
/* A1111's default: the scores of as many queries at once as free memory allows. */
tensor vm_walk_attention_a1111(walk *w, const tensor *x, path name);

/* Tiled VAE's: the same without the norm before and the sum after. */
tensor vm_walk_attention_of_tile(walk *w, const tensor *normed, path name);
/* scaled_dot_product_attention of one head as wide as the channels, on tensors of three or four dimensions;
 * vm_walk_seen: the format of its output, as an image. */
tensor vm_walk_attend(walk *w, const tensor *x, int dims, path name);
layout vm_walk_seen(const tensor *x);

tensor vm_walk_downsample(walk *w, const tensor *x, path name);
tensor vm_walk_upsample(walk *w, const tensor *x, path name);
/* AutoencoderKL's encoder or decoder. */
tensor vm_walk_coder(walk *w, const tensor *x);
/* Either half by A1111's extension Tiled VAE; vm_walk_pad: pixels that it adds to a tile on each side. */
tensor vm_walk_tiled_vae(walk *w, const tensor *x);
uint64_t vm_walk_pad(const vm_trace_vae *vae);

/* A tiny autoencoder's latents or image; and in tiles from `in` to `out` pixels a side, one every `step`. */
tensor vm_walk_tiny(walk *w, const tensor *x);
tensor vm_walk_tiny_tiles(walk *w, const tensor *x, uint64_t in, uint64_t out, uint64_t step);

/* ---- frames ---- */

enum { MOST_CACHED = 2 * VM_MAX_LEVELS * (VM_MAX_LAYERS + 1) + VM_MAX_LEVELS + 6 };

/* What outlives the encoder or decoder: the cache of features, names of a tile's latents and result, and the results of
 * the tile's latent frames before. */
typedef struct frame {
    size_t count, next; /* of the cached; and the next module's */
    uint64_t times;     /* frames of the running module */
    tensor cached[MOST_CACHED], named, result;
    size_t parts;
    tensor *part; /* [vae->frames], borrowed */
} frame;

/* ---- encoders and decoders ---- */

/* How a runtime's code of a family names their modules. */
typedef struct names {
    const char *mid[3], *ends[3]; /* ends: the first convolution, the last norm, the last convolution */
    const char *level[2];         /* an encoder's, a decoder's */
    const char *in_level[3];      /* a resnet, an encoder's and a decoder's resampler */
    const char *in_resnet[5];     /* norm, convolution, norm, convolution, the convolution of a shortcut */
    bool by_size;                 /* levels are numbered from the image's on, otherwise by order of use */
} names;

const names *vm_walk_names(const vm_arch *arch, vm_trace_runtime runtime);

typedef enum part_kind { CONV_IN, RESNET, ATTENTION, RESAMPLER, NORM_OUT, CONV_OUT } part_kind;

/* Instead of a level: before all levels, in the middle, and at the end. */
enum { BEGIN = VM_MAX_LEVELS, MID, END, MOST_PARTS = VM_MAX_LEVELS * (VM_MAX_LAYERS + 2) + 6 };

/* A module of an encoder or a decoder, from `in` to `out` channels. */
typedef struct part {
    part_kind kind;
    size_t level;
    uint64_t in, out;
    bool begins, ends; /* the first or the last module of its level or of the middle */
    path name;
} part;

/* Fills the modules of a half in order of their calls. Returns: how many. */
size_t vm_walk_parts(const vm_arch *arch, vm_trace_runtime runtime, vm_op op, part item[MOST_PARTS]);

/* Returns: whether the resampler after an encoder's level, or before a decoder's, also resamples frames. */
bool vm_walk_is_temporal(const vm_arch *arch, size_t level);

/* A family's modules; each leaves its input to the caller. activate: replaces x, named after its norm. */
typedef struct blocks {
    tensor (*conv)(walk *w, frame *f, const tensor *x, uint64_t c, path name);
    tensor (*resnet)(walk *w, frame *f, const tensor *x, uint64_t c, path name);
    tensor (*attention)(walk *w, const tensor *x, path name);
    tensor (*resample)(walk *w, frame *f, const tensor *x, const part *p);
    tensor (*norm)(walk *w, const tensor *x, path name);
    void (*activate)(walk *w, tensor *x, path name);
} blocks;

/* f: for the blocks only, or NULL. */
tensor vm_walk_half(walk *w, frame *f, const blocks *blocks, const tensor *x);

/* Moves numbers between channels and pixels, to c channels. */
tensor vm_walk_moved(walk *w, const tensor *x, uint64_t c, uint64_t h, uint64_t wide, path name);
/* Returns: whether `all` channels are whole groups of c; otherwise the walk fails. */
bool vm_walk_divides(walk *w, uint64_t all, uint64_t c, path name);
/* Reduces x to 1/side of its rows and columns, with c channels, each the mean of a group. frames: zeros and x, all
 * counted as channels. */
tensor vm_walk_average(walk *w, const tensor *x, uint64_t frames, uint64_t side, uint64_t c, path name);
/* Repeats x to `side` times its rows and columns, with c channels, in `frames` frames. */
tensor vm_walk_repeat(walk *w, const tensor *x, uint64_t frames, uint64_t side, uint64_t c, path name);
/* *h += moved, and gives moved back. */
void vm_walk_add(walk *w, tensor *h, tensor moved, path name);

/* Walks all frames: moments, the image, or the frames as rows. */
tensor vm_walk_frame(walk *w, const tensor *x);
/* An image's patches of 2x2 pixels as channels, or back. */
tensor vm_walk_patch(walk *w, const tensor *x, bool back);
/* Walks the next tile; vm_walk_frame_tiles_done gives back what the last one leaves, except its result. */
tensor vm_walk_frame_tile(walk *w, frame *f, const tensor *part);
void vm_walk_frame_tiles_done(walk *w, frame *f);
/* VM_EINVAL if the runtime's code for this architecture is not modelled. */
vm_status vm_walk_check_code(const vm_arch *arch, vm_trace_runtime runtime);
/* As vm_walk_check_code, and for all but AutoencoderKL also what their classes cannot do. */
vm_status vm_walk_check_class(const vm_trace_vae *v);

#endif
