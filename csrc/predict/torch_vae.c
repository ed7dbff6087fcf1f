/* The traces of two PyTorch VAEs: diffusers' AutoencoderKL (0.33) and the AutoEncoder of BFL's flux repository, as
 * InvokeAI carries it (silu; one tensor, where x * sigmoid(x) would be two).
 *
 * They compute the same. What differs is how long tensors live: a Python name (or a caller's, or the list of the BFL
 * encoder) holds a tensor until it is bound anew or its function returns, and a statement such as h = norm(h) holds
 * both for a moment.
 *
 *              resnet: norm1 silu conv1 norm2 silu conv2 (1x1 shortcut) add (diffusers: and a division by 1)
 *   encode     conv_in | levels: resnets, pad + strided conv | mid: resnet attention resnet | norm silu conv_out | 1x1
 *   decode     1x1 | conv_in | mid | levels: resnets, nearest 2x + conv | norm silu conv_out
 *
 * Functions named after a module return its output and leave its input to the caller. Errors stick in walk.status. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "torch_trace.h"

enum { EXTERNAL = UINT32_MAX }; /* the id of the caller's input */

/* CHANNELS_LAST_ONE: dense in channels-last order, but of batch 1 and with strides that PyTorch does not take for
 * channels_last (the batch's is too small). Group norms and convolutions copy it, interpolation returns NCHW. */
typedef enum layout { CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_ONE } layout;

typedef struct tensor {
    uint32_t id;
    size_t n, c, h, w;
    layout layout;
    bool slice; /* a view that is not dense: an operator that needs it dense copies it */
} tensor;

/* Sides and distance of tiles, in what goes in and in what comes out, and how many there are: 0 where one call does. */
typedef struct tiling {
    size_t in, out, step, rows, cols;
} tiling;

typedef struct walk {
    vm_trace *t;
    const vm_trace_vae *vae;
    tiling tiles;
    vm_status status;
} walk;

typedef struct path {
    char text[2 * VM_NAME];
} path;

__attribute__((format(printf, 2, 3))) static path at(path parent, const char *format, ...) {
    const size_t length = strlen(parent.text);
    va_list args;
    va_start(args, format);
    vsnprintf(parent.text + length, sizeof parent.text - length, format, args);
    va_end(args);
    return parent;
}

static bool diffusers(const walk *w) { return w->vae->runtime == VM_TORCH_DIFFUSERS; }
static size_t element(const walk *w) { return w->vae->dtype == VM_F32 ? 4 : 2; }

/* ---- tensors ---- */

static tensor take(walk *w, size_t n, size_t c, size_t h, size_t x, layout layout, path name) {
    tensor y = {.id = EXTERNAL, .n = n, .c = c, .h = h, .w = x, .layout = layout};
    if (!w->status) w->status = vm_trace_take(w->t, VM_PRODUCT(n, c, h, x, element(w)), name.text, &y.id);
    return y;
}

static tensor take_like(walk *w, const tensor *x, path name) {
    return take(w, x->n, x->c, x->h, x->w, x->layout, name);
}

static void give(walk *w, const tensor *x) {
    if (!w->status && x->id != EXTERNAL) w->status = vm_trace_give(w->t, x->id);
}

/* The Python name *x is bound to y; the tensor that it named before loses its last reference. */
static void bind(walk *w, tensor *x, tensor y) {
    give(w, x);
    *x = y;
}

/* x.contiguous(); a new tensor, or x itself. */
static tensor contiguous(walk *w, const tensor *x, path name) {
    if (x->layout == CONTIGUOUS && !x->slice) return *x;
    return take(w, x->n, x->c, x->h, x->w, CONTIGUOUS, at(name, " [contiguous]"));
}

static void give_copy(walk *w, const tensor *copy, const tensor *of) {
    if (copy->id != of->id) give(w, copy);
}

/* ---- operators ---- */

static tensor conv(walk *w, const tensor *x, size_t k, size_t side, size_t stride, size_t padding, path name) {
    const bool nhwc = x->layout == CHANNELS_LAST && !x->slice;
    const tensor in = nhwc ? *x : contiguous(w, x, name);
    const size_t h = (x->h + 2 * padding - side) / stride + 1, wide = (x->w + 2 * padding - side) / stride + 1;
    const tensor y = take(w, x->n, k, h, wide, nhwc ? CHANNELS_LAST : CONTIGUOUS, name);
    uint32_t filter = EXTERNAL;
    if (!w->status && nhwc && side > 1) /* a 1x1 filter is dense either way */
        w->status =
            vm_trace_take(w->t, VM_PRODUCT(k, x->c, side, side, element(w)), at(name, " [filter]").text, &filter);
    const vm_conv question = {.dtype = w->vae->dtype,
                              .tf32 = true,
                              .nhwc = nhwc,
                              .n = (int64_t)x->n,
                              .c = (int64_t)x->c,
                              .h = (int64_t)x->h,
                              .w = (int64_t)x->w,
                              .k = (int64_t)k,
                              .side = (int64_t)side,
                              .padding = (int64_t)padding,
                              .stride = (int64_t)stride};
    if (!w->status) w->status = vm_trace_conv(w->t, &question, at(name, " [workspace]").text);
    if (!w->status && filter != EXTERNAL) w->status = vm_trace_give(w->t, filter);
    give_copy(w, &in, x);
    return y;
}

static tensor conv3(walk *w, const tensor *x, size_t k, path name) { return conv(w, x, k, 3, 1, 1, name); }
static tensor conv1(walk *w, const tensor *x, size_t k, path name) { return conv(w, x, k, 1, 1, 0, name); }

static tensor norm(walk *w, const tensor *x, path name) {
    const tensor in = contiguous(w, x, name);
    const tensor y = take(w, x->n, x->c, x->h, x->w, CONTIGUOUS, name);
    uint32_t stats[2];
    if (!w->status)
        w->status = vm_trace_norm(w->t, w->vae->dtype, x->n, x->c, w->vae->arch->norm_num_groups,
                                  VM_PRODUCT(x->h, x->w), at(name, " [statistics]").text, stats);
    give_copy(w, &in, x);
    for (int i = 0; !w->status && i < 2; i++) w->status = vm_trace_give(w->t, stats[i]);
    return y;
}

static void blas(walk *w, vm_trace_op op, path name) {
    if (!w->status) w->status = vm_trace_blas(w->t, op, name.text);
}

/* One head as wide as the channels. */
static tensor attend(walk *w, const tensor *x, path name) {
    const size_t tokens = VM_PRODUCT(x->h, x->w);
    const vm_attention_shape shape = {
        .dtype = w->vae->dtype, .batch = x->n, .heads = 1, .queries = tokens, .keys = tokens, .depth = x->c};
    tensor y = *x;
    if (!w->status) w->status = vm_trace_attention(w->t, &shape, &w->vae->gpu, name.text, &y.id);
    return y;
}

/* ---- blocks ---- */

static tensor resnet(walk *w, const tensor *x, size_t c, path name) {
    tensor h = norm(w, x, at(name, ".norm1"));
    bind(w, &h, take_like(w, &h, at(name, ".norm1 [silu]")));
    bind(w, &h, conv3(w, &h, c, at(name, ".conv1")));
    bind(w, &h, norm(w, &h, at(name, ".norm2")));
    bind(w, &h, take_like(w, &h, at(name, ".norm2 [silu]")));
    bind(w, &h, conv3(w, &h, c, at(name, ".conv2")));
    tensor skip = *x;
    if (x->c != c) {
        const path shortcut = at(name, diffusers(w) ? ".conv_shortcut" : ".nin_shortcut");
        const tensor in = diffusers(w) ? contiguous(w, x, shortcut) : *x;
        skip = conv1(w, &in, c, shortcut);
        give_copy(w, &in, x);
    }
    tensor y = take_like(w, &skip, at(name, " [sum]"));
    if (diffusers(w)) bind(w, &y, take_like(w, &y, name)); /* / output_scale_factor */
    give_copy(w, &skip, x);
    give(w, &h);
    return y;
}

static tensor attention_diffusers(walk *w, const tensor *x, path name) {
    const path out = at(name, ".to_out.0");
    const path linear[3] = {at(name, ".to_q"), at(name, ".to_k"), at(name, ".to_v")};
    const tensor normed = norm(w, x, at(name, ".group_norm"));
    /* Linear layers on a transposed input: a batched product, then the bias added in place. The input of one pixel
     * counts as dense, and the product then adds the bias itself. */
    const vm_trace_op product_op = x->h * x->w > 1 ? VM_TRACE_CUBLAS : VM_TRACE_CUBLASLT;
    tensor qkv[3];
    for (int i = 0; i < 3; i++) {
        qkv[i] = take_like(w, &normed, linear[i]);
        blas(w, product_op, linear[i]);
    }
    tensor h = attend(w, x, at(name, " [attention]"));
    const tensor projected = take_like(w, &normed, out);
    blas(w, VM_TRACE_CUBLASLT, at(out, " [workspace]"));
    bind(w, &h, projected);
    /* (N, H*W, C) seen as (N, C, H, W): the batch's stride collapses with one image. */
    const layout seen = x->c == 1 || x->h * x->w == 1 ? CONTIGUOUS : x->n == 1 ? CHANNELS_LAST_ONE : CHANNELS_LAST;
    tensor y = take(w, x->n, x->c, x->h, x->w, seen, at(name, " [sum]"));
    give(w, &h);
    bind(w, &y, take_like(w, &y, name)); /* / rescale_output_factor */
    give(w, &normed);
    for (int i = 0; i < 3; i++) give(w, &qkv[i]);
    return y;
}

static tensor attention_bfl(walk *w, const tensor *x, path name) {
    const path linear[3] = {at(name, ".q"), at(name, ".k"), at(name, ".v")};
    const tensor normed = norm(w, x, at(name, ".norm"));
    tensor qkv[3];
    for (int i = 0; i < 3; i++) qkv[i] = conv1(w, &normed, x->c, linear[i]);
    for (int i = 0; i < 3 && x->c > 1 && x->h * x->w > 1; i++) /* (N, 1, H*W, C), made contiguous */
        bind(w, &qkv[i], take_like(w, &qkv[i], at(linear[i], " [contiguous]")));
    tensor h = attend(w, x, at(name, " [attention]"));
    give(w, &normed);
    for (int i = 0; i < 3; i++) give(w, &qkv[i]);
    h.layout = x->c > 1 ? CHANNELS_LAST : CONTIGUOUS;
    bind(w, &h, conv1(w, &h, x->c, at(name, ".proj_out")));
    const tensor y = take_like(w, x, name);
    give(w, &h);
    return y;
}

/* drops: nobody else names x, so it goes as soon as the first resnet is done. */
static tensor mid(walk *w, const tensor *x, bool drops, path name) {
    const bool d = diffusers(w);
    const path attention = at(name, d ? "mid_block.attentions.0" : "mid.attn_1");
    tensor h = resnet(w, x, x->c, at(name, d ? "mid_block.resnets.0" : "mid.block_1"));
    if (drops) give(w, x);
    if (w->vae->arch->mid_block_add_attention)
        bind(w, &h, d ? attention_diffusers(w, &h, attention) : attention_bfl(w, &h, attention));
    bind(w, &h, resnet(w, &h, x->c, at(name, d ? "mid_block.resnets.1" : "mid.block_2")));
    return h;
}

/* norm, silu, conv_out of *x, which is bound to the result. */
static void finish(walk *w, tensor *x, size_t c, path name) {
    const path normed = at(name, diffusers(w) ? "conv_norm_out" : "norm_out");
    bind(w, x, norm(w, x, normed));
    bind(w, x, take_like(w, x, at(normed, " [silu]")));
    bind(w, x, conv3(w, x, c, at(name, "conv_out")));
}

static tensor downsample(walk *w, const tensor *x, path name) {
    const tensor padded = take(w, x->n, x->c, x->h + 1, x->w + 1, x->layout, at(name, " [pad]"));
    const tensor y = conv(w, &padded, x->c, 3, 2, 0, name);
    give(w, &padded);
    return y;
}

static tensor upsample_conv(walk *w, const tensor *x, path name) {
    const layout layout = x->layout == CHANNELS_LAST ? CHANNELS_LAST : CONTIGUOUS;
    const tensor wide = take(w, x->n, x->c, 2 * x->h, 2 * x->w, layout, at(name, " [nearest 2x]"));
    const tensor y = conv3(w, &wide, x->c, name);
    give(w, &wide);
    return y;
}

/* ---- encoder and decoder ---- */

/* way: "down" or "up". */
static path block_name(const walk *w, path half, const char *way, size_t level, size_t block, bool resamples) {
    const path top = at(half, diffusers(w) ? "%s_blocks.%zu" : "%s.%zu", way, level);
    if (resamples) return at(top, diffusers(w) ? ".%ssamplers.0.conv" : ".%ssample.conv", way);
    return at(top, diffusers(w) ? ".resnets.%zu" : ".block.%zu", block);
}

enum { MOST_KEPT = VM_MAX_LEVELS * (VM_MAX_LAYERS + 1) + 1 };

static tensor encoder(walk *w, const tensor *image) {
    const vm_arch *a = w->vae->arch;
    const path name = {"encoder."};
    tensor h = conv3(w, image, a->block_out_channels[0], at(name, "conv_in"));
    tensor
        kept[MOST_KEPT]; /* BFL: a list of all. diffusers: the caller's name holds the input of a level, or of mid. */
    size_t keeps = 0;
    for (size_t level = 0; level < a->levels; level++) {
        const tensor held = h;
        for (size_t i = 0; i < a->layers_per_block + (level + 1 < a->levels); i++) {
            const bool down = i == a->layers_per_block;
            const path block = block_name(w, name, "down", level, i, down);
            const tensor y = down ? downsample(w, &h, block) : resnet(w, &h, a->block_out_channels[level], block);
            if (!diffusers(w))
                kept[keeps++] = h;
            else if (h.id != held.id)
                give(w, &h);
            h = y;
        }
        if (diffusers(w)) give(w, &held);
    }
    kept[keeps++] = h;
    h = mid(w, &h, false, name);
    if (diffusers(w)) give(w, &kept[--keeps]);
    finish(w, &h, 2 * a->latent_channels, name);
    for (size_t i = 0; i < keeps; i++) give(w, &kept[i]);
    return h;
}

static tensor decoder(walk *w, const tensor *z) {
    const vm_arch *a = w->vae->arch;
    const path name = {"decoder."};
    tensor h = conv3(w, z, a->block_out_channels[a->levels - 1], at(name, "conv_in")), held = h;
    h = mid(w, &h, !diffusers(w), name);
    if (diffusers(w)) give(w, &held); /* by the caller's name, here and below */
    for (size_t i = 0; i < a->levels; i++) {
        const size_t level = a->levels - 1 - i; /* BFL numbers by size, diffusers by order */
        held = h;
        for (size_t j = 0; j < a->layers_per_block + 1 + (level > 0); j++) {
            const bool up = j == a->layers_per_block + 1;
            const path block = block_name(w, name, "up", diffusers(w) ? i : level, j, up);
            const tensor y = up ? upsample_conv(w, &h, block) : resnet(w, &h, a->block_out_channels[level], block);
            if (!diffusers(w) || h.id != held.id) give(w, &h);
            h = y;
        }
        if (diffusers(w)) give(w, &held);
    }
    finish(w, &h, a->out_channels, name);
    return h;
}

static tensor encode_moments(walk *w, const tensor *image) {
    tensor h = encoder(w, image);
    if (w->vae->arch->use_quant_conv && diffusers(w)) bind(w, &h, conv1(w, &h, h.c, (path){"quant_conv"}));
    return h;
}

static tensor decode_latents(walk *w, const tensor *z) {
    tensor h = *z;
    if (w->vae->arch->use_post_quant_conv && diffusers(w)) h = conv1(w, z, z->c, (path){"post_quant_conv"});
    const tensor y = decoder(w, &h);
    give_copy(w, &h, z);
    return y;
}

/* ---- tiles, slices, and what the methods add ---- */

/* b[...] = a[...] * s + b[...] * t, line by line; count: elements of a line. */
static void blend(walk *w, size_t lines, size_t count, path name) {
    for (size_t i = 0; !w->status && i < lines; i++) {
        tensor line[3];
        for (int k = 0; k < 3; k++) line[k] = take(w, 1, 1, 1, count, CONTIGUOUS, name);
        for (int k = 0; k < 3; k++) give(w, &line[k]);
    }
}

static tensor tiled(walk *w, const tensor *x) {
    const bool decodes = w->vae->op == VM_DECODE;
    const size_t in = w->tiles.in, step = w->tiles.step, rows = w->tiles.rows, cols = w->tiles.cols;
    const size_t extent = w->tiles.out / 4, limit = w->tiles.out - extent;
    const path blending = {"blend"}, cat = {"cat"};
    void *block;
    if (!w->status) w->status = vm_mem_alloc(w->t->mem, VM_SCRATCH, (rows * cols + rows) * sizeof(tensor), &block);
    if (w->status) return *x;
    tensor *grid = block, *strip = grid + rows * cols;
    for (size_t i = 0; !w->status && i < rows * cols; i++) {
        tensor part = *x;
        part.h = VM_MIN(in, x->h - i / cols * step);
        part.w = VM_MIN(in, x->w - i % cols * step);
        part.slice = (part.h > 1 && part.w != x->w) || (x->n * x->c > 1 && part.h * part.w != x->h * x->w);
        grid[i] = decodes ? decode_latents(w, &part) : encode_moments(w, &part);
    }
    for (size_t r = 0; !w->status && r < rows; r++) {
        size_t wide = 0;
        for (size_t c = 0; c < cols; c++) {
            const tensor *tile_ = &grid[r * cols + c], *above = tile_ - cols, *left = tile_ - 1;
            const size_t planes = tile_->n * tile_->c;
            if (r) blend(w, VM_MIN(VM_MIN(above->h, tile_->h), extent), planes * tile_->w, blending);
            if (c) blend(w, VM_MIN(VM_MIN(left->w, tile_->w), extent), planes * tile_->h, blending);
            wide += VM_MIN(tile_->w, limit);
        }
        const tensor *first = &grid[r * cols];
        strip[r] = take(w, first->n, first->c, VM_MIN(first->h, limit), wide, CONTIGUOUS, cat);
    }
    size_t high = 0;
    for (size_t r = 0; r < rows; r++) high += strip[r].h;
    const tensor y = take(w, strip[0].n, strip[0].c, high, strip[0].w, CONTIGUOUS, cat);
    for (size_t i = 0; i < rows * cols + rows; i++) give(w, &grid[i]);
    vm_mem_free(w->t->mem, VM_SCRATCH, block, (rows * cols + rows) * sizeof(tensor));
    return y;
}

static tensor one_call(walk *w, const tensor *x) {
    if (w->tiles.rows) return tiled(w, x);
    return w->vae->op == VM_DECODE ? decode_latents(w, x) : encode_moments(w, x);
}

/* A latent-sized tensor: half of the moments' channels. */
static tensor half(walk *w, const tensor *moments, const char *name) {
    return take(w, moments->n, moments->c / 2, moments->h, moments->w, CONTIGUOUS, at((path){""}, "%s", name));
}

/* DiagonalGaussianDistribution: mean and log-variance are views of the moments, the latter clamped into a copy. */
static void posterior(walk *w, const tensor *moments) {
    half(w, moments, "posterior.logvar");
    const tensor halved = half(w, moments, "posterior [0.5 * logvar]");
    half(w, moments, "posterior.std");
    give(w, &halved);
    half(w, moments, "posterior.var");
}

static void sliced(walk *w, const tensor *x) {
    void *block;
    if (!w->status) w->status = vm_mem_alloc(w->t->mem, VM_SCRATCH, x->n * sizeof(tensor), &block);
    if (w->status) return;
    tensor *part = block, one = *x;
    one.n = 1;
    for (size_t i = 0; !w->status && i < x->n; i++) part[i] = one_call(w, &one);
    const tensor y = take(w, x->n, part[0].c, part[0].h, part[0].w, CONTIGUOUS, (path){"cat"});
    if (w->vae->op == VM_ENCODE) posterior(w, &y); /* while the Python list still refers to each slice */
    for (size_t i = 0; i < x->n; i++) give(w, &part[i]);
    vm_mem_free(w->t->mem, VM_SCRATCH, block, x->n * sizeof(tensor));
}

/* The sample that BFL's encode returns: mean + exp(0.5 * logvar) * noise, shifted and scaled. */
static void sample_bfl(walk *w, tensor *moments) {
    const tensor halved = half(w, moments, "reg [0.5 * logvar]"), std = half(w, moments, "reg.std");
    give(w, &halved);
    const tensor noise = half(w, moments, "reg [noise]"), scaled = half(w, moments, "reg [std * noise]");
    give(w, &noise);
    tensor z = half(w, moments, "reg");
    give(w, &scaled);
    give(w, &std);
    give(w, moments);
    const tensor shifted = half(w, moments, "encode [z - shift]");
    const tensor latents = half(w, moments, "encode");
    give(w, &shifted);
    give(w, &z);
    *moments = latents;
}

static void walk_vae(walk *w) {
    const vm_trace_vae *v = w->vae;
    const size_t factor = vm_arch_factor(v->arch);
    const bool decodes = v->op == VM_DECODE;
    const size_t c = decodes ? v->arch->latent_channels : v->arch->in_channels, scale = decodes ? factor : 1;
    tensor x = {.id = EXTERNAL, .n = v->batch, .c = c, .h = v->height / scale, .w = v->width / scale};
    const bool own_input = decodes && !diffusers(w); /* z / scale + shift */
    if (own_input) {
        x = take_like(w, &x, (path){"decode [z / scale]"});
        bind(w, &x, take_like(w, &x, (path){"decode [+ shift]"}));
    }
    if (v->slicing && v->batch > 1) {
        sliced(w, &x);
        return;
    }
    tensor y = one_call(w, &x);
    if (own_input) give(w, &x);
    if (!decodes && diffusers(w)) posterior(w, &y);
    if (!decodes && !diffusers(w)) sample_bfl(w, &y);
}

/* ---- what the outside calls ---- */

static vm_status check(const vm_trace_vae *v) {
    const size_t factor = vm_arch_factor(v->arch), side[2] = {v->height, v->width};
    for (int i = 0; i < 2; i++)
        if (!side[i] || side[i] % factor || side[i] > 1u << 20)
            return vm_fail(VM_EINVAL, "%s: want a multiple of %zu up to 2^20, got %zu", i ? "width" : "height", factor,
                           side[i]);
    if (!v->batch || v->batch > 1u << 16) return vm_fail(VM_EINVAL, "batch: want 1 to 65536, got %zu", v->batch);
    if (v->tile && (v->tile % factor || v->tile < 4 * factor))
        return vm_fail(VM_EINVAL, "tile: want a multiple of %zu, at least %zu, got %zu", factor, 4 * factor, v->tile);
    if (v->runtime == VM_TORCH_DIFFUSERS) return VM_OK;
    if (v->tile || v->slicing) return vm_fail(VM_EINVAL, "tile, slicing: the bfl runtime has neither");
    if (v->arch->use_quant_conv || v->arch->use_post_quant_conv)
        return vm_fail(VM_EINVAL, "runtime: the bfl AutoEncoder has no quant convolutions, %s has", v->arch->name);
    return VM_OK;
}

static tiling tiling_of(const vm_trace_vae *v) {
    const size_t factor = vm_arch_factor(v->arch), small = v->tile / factor;
    const bool decodes = v->op == VM_DECODE;
    const size_t h = decodes ? v->height / factor : v->height, w = decodes ? v->width / factor : v->width;
    tiling t = {.in = decodes ? small : v->tile, .out = decodes ? v->tile : small};
    if (!v->tile || (h <= t.in && w <= t.in)) return t;
    t.step = t.in - t.in / 4;
    t.rows = (h + t.step - 1) / t.step;
    t.cols = (w + t.step - 1) / t.step;
    return t;
}

/* Each call takes dozens of steps, so more calls than these would pass VM_TRACE_STEPS. */
enum { MOST_CALLS = VM_TRACE_STEPS / 64 };

vm_status vm_trace_vae_build(const vm_trace_vae *vae, vm_trace **out) {
    *out = NULL;
    vm_status s = vm_arch_check(vae->arch);
    if (!s) s = check(vae);
    if (s) return s;
    walk w = {.vae = vae, .tiles = tiling_of(vae)};
    const size_t rows = VM_MAX(w.tiles.rows, 1), cols = VM_MAX(w.tiles.cols, 1), slices = vae->slicing ? vae->batch : 1;
    if (VM_PRODUCT(rows, cols, slices) > MOST_CALLS)
        return vm_fail(VM_EINVAL, "tile, slicing: want at most %d tiles in all, got %zu x %zu of %zu slices",
                       MOST_CALLS, rows, cols, slices);
    s = vm_trace_new(out);
    if (s) return s;
    w.t = *out;
    walk_vae(&w);
    if (w.status) {
        vm_trace_free(*out);
        *out = NULL;
    }
    return w.status;
}
