/* The traces of VAEs: the methods that a runtime calls, around the encoder and the decoder of halves.c.
 *
 * Sources: diffusers' AutoencoderKL (tiles and slices); BFL's AutoEncoder; CompVis' ldm/models/autoencoder.py, which
 * A1111 calls too; ComfyUI's comfy/sd.py (class VAE), comfy/utils.py (tiled_scale) and
 * comfy/ldm/models/autoencoder.py. */
#include "walk.h"

/* The encoder or the decoder. A1111's Tiled VAE replaces it if the input is larger than one padded tile. */
static tensor half_of_model(walk *w, const tensor *x) {
    const bool decodes = w->vae->op == VM_DECODE;
    const uint64_t tile = decodes ? w->vae->tile / vm_arch_factor(w->vae->arch) : w->vae->tile;
    if (w->vae->runtime == VM_TORCH_A1111 && tile && VM_MAX(x->h, x->w) > tile + 2 * vm_walk_pad(w->vae))
        return vm_walk_tiled_vae(w, x);
    return vm_walk_coder(w, x);
}

static tensor encode_moments(walk *w, const tensor *image) {
    tensor h = half_of_model(w, image);
    if (w->vae->arch->use_quant_conv) bind(w, &h, conv1(w, &h, h.c, (path){"quant_conv"}));
    return h;
}

static tensor decode_latents(walk *w, const tensor *z) {
    tensor h = *z;
    w->dtype = w->vae->first; /* until the end of the decoder's middle */
    if (w->vae->arch->use_post_quant_conv) h = conv1(w, z, z->c, (path){"post_quant_conv"});
    const tensor y = half_of_model(w, &h);
    give_copy(w, &h, z);
    return y;
}

/* ---- diffusers: tiles, slices, and the methods' own tensors ---- */

/* Sides and distance of tiles, in the input and in the output, and how many there are; 0: one call without tiles. */
typedef struct tiling {
    uint64_t in, out, step, extent, rows, cols; /* extent: blended pixels of the output */
} tiling;

static tiling tiling_of(const vm_trace_vae *v) {
    const bool decodes = v->op == VM_DECODE;
    const uint64_t patch = VM_MAX(v->arch->image_patch, 1), factor = vm_arch_factor(v->arch) / (decodes ? 1 : patch);
    const uint64_t small = v->tile / factor, unit = decodes ? factor : 1;
    uint64_t h = v->height / unit, w = v->width / unit;
    tiling t = {.in = decodes ? small : v->tile, .out = decodes ? v->tile / patch : small};
    const bool is_tiny = v->arch->family == VM_TINY;
    if (!v->tile || (!is_tiny && h <= t.in && w <= t.in)) return t;
    if (is_tiny) {
        t.step = t.in - (uint64_t)((double)t.in * v->tile_overlap);
    } else if (v->arch->family == VM_WAN) { /* sets the distance of tiles in pixels */
        const uint64_t stride = (uint64_t)((double)v->tile * (1 - v->tile_overlap));
        const uint64_t latents = VM_MAX(stride / factor, 1);
        t.step = decodes ? latents : stride;
        t.extent = decodes ? (v->tile - stride) / patch : small - latents;
        if (!decodes) h /= patch, w /= patch; /* tiles count patches, as many as the requested pixels */
    } else {
        t.step = (uint64_t)((double)t.in * (1 - v->tile_overlap));
        t.extent = (uint64_t)((double)t.out * v->tile_overlap);
    }
    t.rows = (h + t.step - 1) / t.step;
    t.cols = (w + t.step - 1) / t.step;
    return t;
}

/* b[...] = a[...] * s + b[...] * t, line by line; count: elements of a line. */
static void blend(walk *w, uint64_t lines, uint64_t count, path name) {
    for (uint64_t i = 0; !w->status && i < lines; i++) {
        tensor line[3];
        const size_t from = w->t->steps;
        for (int k = 0; k < 3; k++) line[k] = take(w, 1, 1, 1, count, CONTIGUOUS, name);
        for (int k = 0; k < 3; k++) give(w, &line[k]);
        if (!w->status) w->status = vm_trace_note_stretch(w->t, from);
    }
}

/* The tiled decodes of AutoencoderKLWan, from 0.36 on, and of AutoencoderKLQwenImage21 clamp their image;
 * AutoencoderKLQwenImage's does not. */
enum { CLAMPS_TILES = 36 };
static bool clamps_tiles(const vm_trace_vae *v) {
    return v->op == VM_DECODE && v->release >= CLAMPS_TILES && (v->arch->residual || !strcmp(v->arch->name, "wan2.1"));
}

static tensor untiled(walk *w, const tensor *x) {
    if (w->vae->arch->family != VM_KL) return vm_walk_frame(w, x);
    return w->vae->op == VM_DECODE ? decode_latents(w, x) : encode_moments(w, x);
}

static tensor tiled(walk *w, const tensor *x, tiling tiles) {
    const bool is_frame = w->vae->arch->family == VM_WAN;
    const uint64_t in = tiles.in, step = tiles.step;
    const size_t rows = (size_t)tiles.rows, cols = (size_t)tiles.cols; /* at most MOST_CALLS */
    const uint64_t extent = tiles.extent, limit = tiles.out - extent;
    const path blending = {"blend"}, cat = {"cat"};
    tensor *grid;
    if (!w->status) w->status = vm_scratch_new(rows * cols + rows + (size_t)w->vae->frames, sizeof *grid, &grid);
    if (w->status) return *x;
    tensor *strip = grid + rows * cols;
    frame f = {.named = {.id = EXTERNAL}, .result = {.id = EXTERNAL}, .part = strip + rows};
    for (size_t i = 0; !w->status && i < rows * cols; i++) {
        tensor part = *x;
        part.h = VM_MIN(in, x->h - i / cols * step);
        part.w = VM_MIN(in, x->w - i % cols * step);
        const uint64_t planes = x->layout == CHANNELS_LAST ? x->n : x->n * x->c; /* one after the other in memory */
        part.slice = (part.h > 1 && part.w != x->w) || (planes > 1 && part.h * part.w != x->h * x->w);
        grid[i] = is_frame ? vm_walk_frame_tile(w, &f, &part) : untiled(w, &part);
    }
    if (is_frame) vm_walk_frame_tiles_done(w, &f);
    for (size_t r = 0; !w->status && r < rows; r++) {
        uint64_t wide = 0;
        for (size_t c = 0; c < cols; c++) {
            const tensor *tile_ = &grid[r * cols + c], *above = tile_ - cols, *left = tile_ - 1;
            const uint64_t planes = tile_->n * tile_->c;
            if (r) blend(w, VM_MIN(VM_MIN(above->h, tile_->h), extent), planes * tile_->w, blending);
            if (c) blend(w, VM_MIN(VM_MIN(left->w, tile_->w), extent), planes * tile_->h, blending);
            wide += VM_MIN(tile_->w, limit);
        }
        const tensor *first = &grid[r * cols];
        strip[r] = take(w, first->n, first->c, VM_MIN(first->h, limit), wide, CONTIGUOUS, cat);
    }
    uint64_t high = 0;
    for (size_t r = 0; r < rows; r++) high += strip[r].h;
    tensor y = take(w, strip[0].n, strip[0].c, high, strip[0].w, CONTIGUOUS, cat);
    if (is_frame && clamps_tiles(w->vae)) {
        const uint64_t patch = VM_MAX(w->vae->arch->image_patch, 1), scale = vm_arch_factor(w->vae->arch) / patch;
        y.h = VM_MIN(y.h, x->h * scale);
        y.w = VM_MIN(y.w, x->w * scale);
        if (patch > 1) bind(w, &y, vm_walk_patch(w, &y, true));
        bind(w, &y, take(w, y.n, y.c, y.h, y.w, CONTIGUOUS, cat));
    }
    for (size_t i = 0; i < rows * cols + rows; i++) give(w, &grid[i]);
    for (size_t i = 0; i < f.parts; i++) give(w, &f.part[i]);
    give(w, &f.result);
    vm_scratch_free(grid);
    return y;
}

static tensor one_call(walk *w, const tensor *x) {
    const tiling tiles = tiling_of(w->vae);
    if (w->vae->arch->family == VM_TINY)
        return tiles.rows ? vm_walk_tiny_tiles(w, x, tiles.in, tiles.out, tiles.step) : vm_walk_tiny(w, x);
    if (!tiles.rows) return untiled(w, x);
    const bool patches = w->vae->arch->image_patch && w->vae->op == VM_ENCODE;
    const tensor in = patches ? vm_walk_patch(w, x, false) : *x, y = tiled(w, &in, tiles);
    give_copy(w, &in, x);
    return y;
}

/* A latent-sized tensor: half of the moments' channels. */
static tensor half(walk *w, const tensor *moments, const char *name) {
    return take(w, moments->n, moments->c / 2, moments->h, moments->w, CONTIGUOUS, at((path){""}, "%s", name));
}

typedef struct gaussian {
    tensor logvar, std, var;
} gaussian;

/* DiagonalGaussianDistribution: mean and log-variance are views of the moments; clamping copies the latter. */
static gaussian posterior(walk *w, const tensor *moments) {
    gaussian g = {.logvar = half(w, moments, "posterior.logvar")};
    const tensor halved = half(w, moments, "posterior [0.5 * logvar]");
    g.std = half(w, moments, "posterior.std");
    give(w, &halved);
    g.var = half(w, moments, "posterior.var");
    return g;
}

static bool has_posterior(const walk *w) { return w->vae->op == VM_ENCODE && w->vae->arch->family != VM_TINY; }

static void sliced(walk *w, const tensor *x) {
    const size_t slices = (size_t)x->n;
    tensor *part, one = *x;
    if (!w->status) w->status = vm_scratch_new(slices, sizeof *part, &part);
    if (w->status) return;
    one.n = 1;
    for (size_t i = 0; !w->status && i < slices; i++) part[i] = one_call(w, &one);
    const bool is_float = w->vae->tile && w->vae->arch->family == VM_TINY; /* tiles are blended in float32 */
    const tensor y =
        take_sized(w, x->n, part[0].c, part[0].h, part[0].w, CONTIGUOUS, is_float ? 4 : element(w), (path){"cat"});
    if (has_posterior(w)) posterior(w, &y); /* the Python list still refers to each slice */
    for (size_t i = 0; i < slices; i++) give(w, &part[i]);
    vm_scratch_free(part);
}

static void call_diffusers(walk *w, tensor x) {
    if (w->vae->slicing && x.n > 1) {
        sliced(w, &x);
        return;
    }
    const tensor y = one_call(w, &x);
    if (has_posterior(w)) posterior(w, &y);
}

/* ---- the other runtimes' methods ---- */

/* CompVis' encode, whose name h keeps the encoder's output, and its decode. */
static void call_compvis(walk *w, tensor x) {
    if (w->vae->op == VM_DECODE) {
        decode_latents(w, &x);
        return;
    }
    const tensor h = half_of_model(w, &x), moments = conv1(w, &h, h.c, (path){"quant_conv"});
    posterior(w, &moments);
    give(w, &h);
}

/* mean + std * noise */
static tensor draw(walk *w, const tensor *moments) {
    const tensor noise = half(w, moments, "sample [noise]"), scaled = half(w, moments, "sample [std * noise]");
    give(w, &noise);
    const tensor z = half(w, moments, "sample");
    give(w, &scaled);
    return z;
}

/* BFL's decode reads latents / scale + shift; its encode returns a sample, shifted and scaled. */
static void call_bfl(walk *w, tensor x) {
    if (w->vae->op == VM_DECODE) {
        x = take_like(w, &x, (path){"decode [z / scale]"});
        bind(w, &x, take_like(w, &x, (path){"decode [+ shift]"}));
        decode_latents(w, &x);
        give(w, &x);
        return;
    }
    const tensor moments = encode_moments(w, &x);
    const tensor halved = half(w, &moments, "sample [0.5 * logvar]"), std = half(w, &moments, "sample.std");
    give(w, &halved);
    const tensor z = draw(w, &moments);
    give(w, &std);
    give(w, &moments);
    const tensor shifted = half(w, &moments, "encode [z - shift]");
    half(w, &moments, "encode");
    give(w, &shifted);
    give(w, &z);
}

/* Returns: the side in image pixels of one pixel of the runtime's latents. */
static uint64_t unit_of(const vm_trace_vae *v) {
    return vm_arch_factor(v->arch) * (vm_walk_frames[v->runtime].packs ? VM_MAX(v->arch->patch_size[0], 1) : 1);
}

/* A copy of x with 2x2 pixels as channels, or back. */
static tensor repack(walk *w, const tensor *x, bool packs) {
    const uint64_t side = w->vae->arch->patch_size[0], c = x->c, area = side * side;
    return packs ? take(w, x->n, c * area, x->h / side, x->w / side, CONTIGUOUS, (path){"latents [packed]"})
                 : take(w, x->n, c / area, x->h * side, x->w * side, CONTIGUOUS, (path){"latents [unpacked]"});
}

/* FLUX.2's latents in ComfyUI: decode(z) multiplies them, adds, and holds the factors until it returns. gives: only
 * decode's own name holds z (a tile's), so z is given back. */
static tensor decode_packed(walk *w, tensor *z, bool gives) {
    tensor scale = take(w, 1, z->c, 1, 1, CONTIGUOUS, (path){"bn [variance + eps]"});
    bind(w, &scale, take(w, 1, z->c, 1, 1, CONTIGUOUS, (path){"bn [deviation]"}));
    tensor h = take_like(w, z, (path){"latents [z * deviation]"});
    bind(w, &h, take_like(w, z, (path){"latents [+ mean]"}));
    if (gives) {
        give(w, z);
        z->id = EXTERNAL;
    }
    bind(w, &h, repack(w, &h, false));
    const tensor y = decode_latents(w, &h);
    give(w, &h);
    give(w, &scale);
    return y;
}

/* Packs encode's latents, then normalises them by batch_norm, with a temporary mean and deviation. */
static tensor encode_packed(walk *w, const tensor *mean) {
    const tensor packed = repack(w, mean, true);
    give(w, mean);
    const tensor y = take_like(w, &packed, (path){"encode [bn]"});
    tensor saved[2];
    for (int i = 0; i < 2; i++) saved[i] = take_sized(w, 1, y.c, 1, 1, CONTIGUOUS, 4, (path){"bn [saved]"});
    for (int i = 0; i < 2; i++) give(w, &saved[i]);
    give(w, &packed);
    return y;
}

/* One call of ComfyUI's model. The input comes from the host, as (N, H, W, C) for images, and keeps its strides; encode
 * also makes latents; the result goes to the host, a tile's as floats. */
static void call_from_host(walk *w, tensor x, bool tile) {
    const bool decodes = w->vae->op == VM_DECODE;
    const bool is_frame = w->vae->arch->family == VM_WAN; /* that axis has the strides of one that is not last */
    const layout layout = decodes || x.c == 1 ? CONTIGUOUS : is_frame ? CHANNELS_LAST_ONE : CHANNELS_LAST;
    tensor in = take(w, x.n, x.c, x.h, x.w, layout, (path){"input"});
    const bool packs = w->frames->packs && w->vae->arch->patch_size[0];
    tensor y;
    if (is_frame) {
        y = vm_walk_frame(w, &in);
        if (!decodes) y.c /= 2; /* the mean, a view */
    } else if (decodes) {
        y = packs ? decode_packed(w, &in, tile) : decode_latents(w, &in);
    } else {
        const tensor moments = encode_moments(w, &in);
        const gaussian g = posterior(w, &moments);
        y = moments; /* the mean is a view of the moments */
        y.c /= 2;
        if (w->frames->draws) y = draw(w, &moments);
        give(w, &g.logvar);
        give(w, &g.std);
        give(w, &g.var);
        if (w->frames->draws) give(w, &moments);
        if (packs) y = encode_packed(w, &y);
    }
    give(w, &in);
    if (tile && element(w) < 4) bind(w, &y, take_sized(w, y.n, y.c, y.h, y.w, CONTIGUOUS, 4, (path){"[float]"}));
    give(w, &y);
}

static uint64_t tiles_along(uint64_t side, uint64_t tile, uint64_t overlap) {
    return side > tile ? VM_ROUND_UP(side - overlap, tile - overlap) / (tile - overlap) : 1;
}

/* comfy/sd.py: without tiles, the whole batch. With tiles, image by image, three times: in squares, and in tiles of
 * twice the width or the height; models for video once, in squares. Nodes' overlap: 64 pixels, at most a quarter of the
 * tile. */
static void call_comfyui(walk *w, tensor x) {
    const vm_trace_vae *v = w->vae;
    const bool decodes = v->op == VM_DECODE;
    const uint64_t scale = decodes ? unit_of(v) : 1, tile = v->tile / scale;
    const uint64_t overlap = VM_MIN(64, v->tile / 4) / scale;
    const uint64_t square[2] = {tile, tile}, wide[2] = {tile / 2, 2 * tile}, high[2] = {2 * tile, tile / 2};
    const uint64_t *const passes[2][3] = {{square, wide, high}, {high, wide, square}};
    const bool once = v->arch->family == VM_WAN;
    if (!v->tile) call_from_host(w, x, false);
    x.n = 1;
    for (uint64_t i = 0; v->tile && i < (once ? 1 : 3) * v->batch; i++) {
        const uint64_t *side = once ? square : passes[decodes][i / v->batch];
        const uint64_t rows = tiles_along(x.h, side[0], overlap), cols = tiles_along(x.w, side[1], overlap);
        for (uint64_t k = 0; !w->status && k < rows * cols; k++) {
            tensor part = x;
            part.h = VM_MIN(side[0], x.h - k / cols * (side[0] - overlap));
            part.w = VM_MIN(side[1], x.w - k % cols * (side[1] - overlap));
            const size_t from = w->t->steps;
            call_from_host(w, part, true);
            if (!w->status) w->status = vm_trace_note_stretch(w->t, from);
        }
    }
}

static void (*const call[VM_TORCH_RUNTIMES])(walk *w, tensor x) = {
    [VM_TORCH_DIFFUSERS] = call_diffusers, [VM_TORCH_BFL] = call_bfl,       [VM_TORCH_COMFYUI] = call_comfyui,
    [VM_TORCH_A1111] = call_compvis,       [VM_TORCH_FORGE] = call_comfyui,
};

/* ---- the API ---- */

enum { MOST_FRAMES = 1 << 10 };

/* VM_EINVAL if the runtime's code cannot do the request. */
static vm_status check_runtime(const vm_trace_vae *v) {
    const char *name = vm_trace_runtime_name[v->runtime];
    const quant quant = vm_walk_frames[v->runtime].quant;
    const int convs = v->arch->use_quant_conv + v->arch->use_post_quant_conv;
    const bool is_of_videos = (v->arch->residual && v->arch->slices) || !strcmp(v->arch->name, "wan2.1");
    /* An encode ends with one frame: two levels halve four. */
    const bool is_known = is_of_videos && (v->op == VM_DECODE || (!v->arch->residual && v->arch->levels == 4));
    if (v->frames > 1 && (!is_known || v->runtime != VM_TORCH_DIFFUSERS))
        return vm_fail(VM_EINVAL,
                       VM_EXPECTED("frames", "1 unless diffusers' AutoencoderKLWan decodes, or Wan 2.1's encodes",
                                   "%" PRIu64 " for %s"),
                       v->frames, v->arch->name);
    if (v->arch->family != VM_KL) return vm_walk_check_class(v);
    if (v->arch->patch_size[0] && v->runtime != VM_TORCH_DIFFUSERS && !vm_walk_frames[v->runtime].packs)
        return vm_fail(VM_EINVAL,
                       VM_EXPECTED("runtime", "diffusers or comfyui for %s, whose BatchNorm is theirs", "%s"),
                       v->arch->name, name);
    if (quant == QUANT_NONE && convs)
        return vm_fail(VM_EINVAL,
                       VM_EXPECTED("runtime", "one whose VAE has quant convolutions for %s, such as diffusers", "%s"),
                       v->arch->name, name);
    if (quant == QUANT_BOTH && convs < 2)
        return vm_fail(
            VM_EINVAL,
            VM_EXPECTED("runtime", "one whose VAE can lack quant convolutions for %s, such as bfl or comfyui", "%s"),
            v->arch->name, name);
    if (quant == QUANT_EVEN && convs == 1)
        return vm_fail(VM_EINVAL,
                       VM_EXPECTED("runtime", "diffusers for %s, which has one of two quant convolutions", "%s"),
                       v->arch->name, name);
    if (v->slicing && v->runtime != VM_TORCH_DIFFUSERS)
        return vm_fail(VM_EINVAL, VM_EXPECTED("slicing", "the diffusers runtime", "%s (a batch of 1 is one slice)"),
                       name);
    if ((v->passing.count || v->first != v->dtype) && v->runtime != VM_TORCH_DIFFUSERS)
        return vm_fail(VM_EINVAL, VM_EXPECTED("%s", "the diffusers runtime", "%s"),
                       v->passing.count ? "passing" : "first", name);
    if (v->first != v->dtype && v->op == VM_ENCODE)
        return vm_fail(VM_EINVAL, VM_EXPECTED("first", "decode", "encode, which runs none of these modules"));
    if (v->tile && v->runtime == VM_TORCH_BFL)
        return vm_fail(VM_EINVAL,
                       VM_EXPECTED("tile", "diffusers, comfyui or a1111 for tiles, the %s runtime has none", ""), name);
    return VM_OK;
}

static vm_status check(const vm_trace_vae *v) {
    const uint64_t factor = unit_of(v), side[2] = {v->height, v->width};
    for (int i = 0; i < 2; i++)
        if (!side[i] || side[i] % factor || side[i] > VM_MAX_SIDE)
            return vm_fail(VM_EINVAL, VM_EXPECTED("%s", "a multiple of %" PRIu64 " up to %d", "%" PRIu64),
                           i ? "width" : "height", factor, VM_MAX_SIDE, side[i]);
    if (!v->batch || v->batch > 1u << 16)
        return vm_fail(VM_EINVAL, VM_EXPECTED("batch", "1 to 65536", "%" PRIu64), v->batch);
    if (!v->frames || v->frames > MOST_FRAMES)
        return vm_fail(VM_EINVAL, VM_EXPECTED("frames", "1 to %d", "%" PRIu64), MOST_FRAMES, v->frames);
    const uint64_t multiple = call[v->runtime] == call_comfyui ? 2 * factor : factor; /* ComfyUI halves tiles */
    if (v->tile && (v->tile % multiple || v->tile < 4 * factor || v->tile > VM_MAX_SIDE))
        return vm_fail(VM_EINVAL,
                       VM_EXPECTED("tile", "a multiple of %" PRIu64 ", at least %" PRIu64 ", at most %d", "%" PRIu64),
                       multiple, 4 * factor, VM_MAX_SIDE, v->tile);
    if (v->tile && !(v->tile_overlap >= 0 && (double)(v->tile / factor) * (1 - v->tile_overlap) >= 1))
        return vm_fail(
            VM_EINVAL,
            VM_EXPECTED("tile_overlap", "from 0 to less than 1, a latent less than a tile of %" PRIu64, "%g"),
            v->tile / factor, v->tile_overlap);
    return check_runtime(v);
}

/* Each call takes dozens of steps, so more calls would exceed VM_TRACE_STEPS. */
enum { MOST_CALLS = VM_TRACE_STEPS / 64 };

vm_status vm_trace_vae_copy(const vm_trace_vae *vae, vm_trace_vae **out) {
    struct {
        vm_trace_vae vae;
        vm_arch arch;
    } *copy;
    const vm_status s = vm_scratch_new(1, sizeof *copy, &copy);
    *out = NULL;
    if (s) return s;
    copy->vae = *vae;
    copy->arch = *vae->arch;
    copy->vae.arch = &copy->arch;
    *out = &copy->vae;
    return VM_OK;
}

vm_status vm_trace_vae_build(const vm_trace_vae *vae, vm_trace **out) {
    *out = NULL;
    vm_status s;
    if ((s = vm_arch_check(vae->arch))) return s;
    if ((s = check(vae))) return s;
    const tiling tiles = tiling_of(vae);
    const uint64_t rows = VM_MAX(tiles.rows, 1), cols = VM_MAX(tiles.cols, 1), slices = vae->slicing ? vae->batch : 1;
    if (VM_PRODUCT64(rows, cols, slices, vae->frames) > MOST_CALLS)
        return vm_fail(
            VM_EOVERFLOW,
            VM_EXPECTED("tile, slicing", "at most %d tiles in all", "%" PRIu64 " x %" PRIu64 " of %" PRIu64 " slices"),
            MOST_CALLS, rows, cols, slices);
    s = vm_trace_new(out);
    if (s) return s;
    const bool decodes = vae->op == VM_DECODE;
    const uint64_t scale = decodes ? unit_of(vae) : 1, packed = unit_of(vae) / vm_arch_factor(vae->arch);
    walk w = {.t = *out, .vae = vae, .frames = &vm_walk_frames[vae->runtime], .dtype = vae->dtype};
    w.status = vm_passage_new(*out, &vae->passing, &w.through);
    w.through.in_order = true;
    call[vae->runtime](&w,
                       (tensor){.id = EXTERNAL,
                                .n = vae->batch,
                                .c = decodes ? vae->arch->latent_channels * packed * packed : vae->arch->in_channels,
                                .h = vae->height / scale,
                                .w = vae->width / scale,
                                .layout = vae->picture ? CHANNELS_LAST : CONTIGUOUS});
    vm_passage_free(&w.through);
    if (!w.status && vae->runtime == VM_TORCH_A1111) w.status = vm_trace_vae_copy(vae, &(*out)->walk);
    if (w.status) {
        vm_trace_free(*out);
        *out = NULL;
    }
    return w.status;
}
