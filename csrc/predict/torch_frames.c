/* One frame of diffusers' AutoencoderKLWan and AutoencoderKLQwenImage, which are made for videos.
 *
 * They run an image as 3D. Every causal convolution pads its input into a copy of three frames, two of zeros in front;
 * one that is wider than a pixel also leaves a clone of its input in a cache, where the next frames would find it, and
 * all of these live until the call ends. Norms are F.normalize, factor by factor.
 *
 *            resnet: (1x1x1 shortcut) norm1 silu conv1 norm2 silu conv2 add
 *   encode   conv_in | levels: resnets, pad + strided conv | mid: resnet attention resnet | norm silu conv_out | 1x1x1
 *   decode   1x1x1 | conv_in | mid | levels: resnets, nearest 2x + conv to half the channels | norm silu conv_out clamp
 *
 * Releases differ: `release` of vm_trace_vae says which one is followed.
 *
 * ComfyUI's WanVAE (comfy/ldm/wan/vae.py since its #13014), whose decode alone is followed, caches nothing for one
 * frame. Its convolutions take the last slice of their filters, which is copied, and pad nothing; its decoder holds
 * what the middle made. */
#include "torch_walk.h"

enum { WITH_TILES = 34, FLOAT_NORM = 38 };

static bool is_comfyui(const walk *w) { return w->vae->runtime == VM_TORCH_COMFYUI; }

static void keep(walk *w, frame *f, const tensor *x, path name) {
    if (!is_comfyui(w) && f->count < MOST_CACHED) f->cached[f->count++] = take_like(w, x, at(name, " [cache]"));
}

static void forget(walk *w, frame *f) {
    for (size_t i = 0; i < f->count; i++) give(w, &f->cached[i]);
    f->count = 0;
}

/* A causal convolution without what it caches. */
static tensor causal(walk *w, const tensor *x, size_t k, size_t side, path name) {
    const bool pads = !is_comfyui(w);
    const size_t border = pads ? side - 1 : 0, h = x->h + border, wide = x->w + border;
    tensor copy = *x; /* of the input, or of the filters */
    if (pads) copy = take(w, x->n, VM_PRODUCT(x->c, side), h, wide, CONTIGUOUS, at(name, " [pad]"));
    const tensor in = pads ? *x : contiguous(w, x, name);
    const tensor y = take(w, x->n, k, x->h, x->w, CONTIGUOUS, name);
    if (!pads && side > 1) copy = take(w, k, x->c, side, side, CONTIGUOUS, at(name, " [filter]"));
    const int64_t shape[4] = {(int64_t)x->n, (int64_t)x->c, (int64_t)h, (int64_t)wide};
    vm_conv question = vm_conv_square(w->dtype, shape, (int64_t)k, (int64_t)side, 1, pads ? 0 : (int64_t)side / 2);
    question.tf32 = true;
    question.dims = 3;
    if (pads) question.size[0] = question.filter[0] = (int64_t)side;
    if (!w->status) w->status = vm_trace_conv(w->t, &question, at(name, " [workspace]").text);
    give_copy(w, &copy, x);
    give_copy(w, &in, x);
    return y;
}

/* The same of a name that is bound to the result, with its cache. */
static void remember_and_convolve(walk *w, frame *f, tensor *x, size_t k, path name) {
    keep(w, f, x, name);
    bind(w, x, causal(w, x, k, 3, name));
}

/* F.normalize(x) * scale * gamma + bias. From 0.38 on half precision is normalised in float32, and a name holds what
 * comes of it. */
static tensor rms_norm(walk *w, const tensor *x, path name) {
    const bool named = w->vae->release >= FLOAT_NORM && !is_comfyui(w), widens = named && element(w) < 4;
    const size_t size = widens ? 4 : element(w);
    tensor in = *x;
    if (widens) in = take_sized(w, x->n, x->c, x->h, x->w, CONTIGUOUS, size, at(name, " [float]"));
    const tensor length = take_sized(w, x->n, 1, x->h, x->w, CONTIGUOUS, size, at(name, " [length]"));
    const tensor clamped = take_sized(w, x->n, 1, x->h, x->w, CONTIGUOUS, size, at(name, " [length, clamped]"));
    give(w, &length);
    tensor unit = take_sized(w, x->n, x->c, x->h, x->w, CONTIGUOUS, size, at(name, " [x / length]"));
    give(w, &clamped);
    give_copy(w, &in, x);
    if (widens) bind(w, &unit, take_like(w, x, at(name, " [to %s]", vm_dtype_name(w->dtype))));
    tensor scaled = take_like(w, x, at(name, " [scaled]"));
    if (!named) give(w, &unit);
    bind(w, &scaled, take_like(w, x, at(name, " [* gamma]")));
    const tensor y = take_like(w, x, name);
    give(w, &scaled);
    if (named) give(w, &unit);
    return y;
}

static void silu(walk *w, tensor *x, path name) { bind(w, x, take_like(w, x, at(name, " [silu]"))); }

static tensor resnet(walk *w, frame *f, const tensor *x, size_t c, path name) {
    const bool comfyui = is_comfyui(w);
    const path shortcut = at(name, comfyui ? ".shortcut" : ".conv_shortcut");
    tensor skip = *x;
    if (x->c != c && !comfyui) skip = causal(w, x, c, 1, shortcut);
    tensor h = *x;
    for (int i = 1; i <= 2; i++) {
        const path norm = comfyui ? at(name, ".residual.%d", 3 * i - 3) : at(name, ".norm%d", i);
        const tensor normed = rms_norm(w, &h, norm);
        give_copy(w, &h, x);
        h = normed;
        silu(w, &h, norm);
        remember_and_convolve(w, f, &h, c, comfyui ? at(name, ".residual.%d", 4 * i - 2) : at(name, ".conv%d", i));
    }
    if (x->c != c && comfyui) skip = causal(w, x, c, 1, shortcut);
    const tensor y = take_like(w, &h, name);
    vm_trace_move(w->t, y.bytes); /* which reads two */
    give_copy(w, &skip, x);
    give(w, &h);
    return y;
}

static tensor attention(walk *w, const tensor *x, path name) {
    const tensor normed = rms_norm(w, x, at(name, ".norm"));
    tensor qkv = conv1(w, &normed, 3 * x->c, at(name, ".to_qkv")), own[3];
    const bool copies = x->h * x->w > 1, comfyui = is_comfyui(w);
    const path by_token = at(name, " [q, k, v by token]");
    for (int i = 0; copies && comfyui && i < 3; i++)
        own[i] = take_like(w, x, by_token); /* of a function that returns */
    if (copies && !comfyui) bind(w, &qkv, take_like(w, &qkv, by_token));
    tensor h = vm_walk_attend(w, x, name);
    for (int i = 0; copies && comfyui && i < 3; i++) give(w, &own[i]);
    give(w, &normed);
    h.layout = x->c > 1 && x->h * x->w == 1 ? CHANNELS_LAST : vm_walk_seen(x);
    bind(w, &h, conv1(w, &h, x->c, at(name, ".proj")));
    tensor y = take(w, x->n, x->c, x->h, x->w, CONTIGUOUS, at(name, " [sum]"));
    if (h.layout == CHANNELS_LAST && !either(x)) y.layout = CHANNELS_LAST_ONE; /* as five dimensions */
    vm_trace_move(w->t, y.bytes);
    give(w, &qkv);
    give(w, &h);
    return y;
}

/* Of an input that it gives back. */
static tensor mid(walk *w, frame *f, tensor x, path half) {
    static const char *const names[2][3] = {{"mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1"},
                                            {"middle.0", "middle.1", "middle.2"}};
    const char *const *name = names[is_comfyui(w)];
    tensor h = resnet(w, f, &x, x.c, at(half, "%s", name[0]));
    if (is_comfyui(w)) give(w, &x);
    if (w->vae->arch->mid_block_add_attention) bind(w, &h, attention(w, &h, at(half, "%s", name[1])));
    bind(w, &h, resnet(w, f, &h, x.c, at(half, "%s", name[2])));
    if (!is_comfyui(w)) give(w, &x); /* which its caller's name held */
    return h;
}

static void finish(walk *w, frame *f, tensor *x, size_t c, path half) {
    const path name = at(half, is_comfyui(w) ? "head.0" : "norm_out");
    bind(w, x, rms_norm(w, x, name));
    silu(w, x, name);
    remember_and_convolve(w, f, x, c, at(half, is_comfyui(w) ? "head.2" : "conv_out"));
}

/* An input that is the caller's. */
static tensor begin(walk *w, frame *f, const tensor *x, size_t c, path half) {
    const path name = at(half, is_comfyui(w) ? "conv1" : "conv_in");
    keep(w, f, x, name);
    return causal(w, x, c, 3, name);
}

static tensor encoder(walk *w, frame *f, const tensor *image) {
    const vm_arch *a = w->vae->arch;
    const size_t *width = vm_arch_widths(a, VM_ENCODE);
    const path name = {"encoder."};
    tensor h = begin(w, f, image, width[0], name);
    size_t block = 0;
    for (size_t level = 0; level < a->levels; level++) {
        for (size_t i = 0; i < a->layers_per_block; i++)
            bind(w, &h, resnet(w, f, &h, width[level], at(name, "down_blocks.%zu", block++)));
        if (level + 1 == a->levels) break;
        const path resample = at(name, "down_blocks.%zu.resample.1", block++);
        const tensor y = vm_walk_downsample(w, &h, resample);
        if (level) keep(w, f, &y, resample); /* what halves the frames too keeps its last one */
        bind(w, &h, y);
    }
    h = mid(w, f, h, name);
    finish(w, f, &h, 2 * a->latent_channels, name);
    return h;
}

/* In float32, in diffusers. */
static tensor upsample(walk *w, const tensor *x, path name) {
    const bool widens = element(w) < 4 && !is_comfyui(w);
    const size_t size = widens ? 4 : element(w);
    tensor in = *x;
    if (widens) in = take_sized(w, x->n, x->c, x->h, x->w, CONTIGUOUS, size, at(name, " [float]"));
    tensor wide = take_sized(w, x->n, x->c, 2 * x->h, 2 * x->w, CONTIGUOUS, size, at(name, " [nearest 2x]"));
    give_copy(w, &in, x);
    if (widens) bind(w, &wide, take_like(w, &wide, at(name, " [nearest 2x, to %s]", vm_dtype_name(w->dtype))));
    const tensor y = conv3(w, &wide, x->c / 2, name);
    give(w, &wide);
    return y;
}

static tensor decoder(walk *w, frame *f, const tensor *z) {
    const vm_arch *a = w->vae->arch;
    const size_t *width = vm_arch_widths(a, VM_DECODE), last = a->levels - 1;
    const bool comfyui = is_comfyui(w);
    const path name = {"decoder."};
    tensor h = begin(w, f, z, width[last], name);
    h = mid(w, f, h, name);
    tensor held = h; /* by a caller's name: a level's input, in ComfyUI the first one's to the end */
    for (size_t i = 0, block = 0; i <= last; i++) {
        const path up = at(name, "up_blocks.%zu", i);
        for (size_t j = 0; j < a->layers_per_block + 1 + (i < last); j++, block++) {
            const bool widens = j > a->layers_per_block;
            const path own = widens ? at(up, ".upsamplers.0") : at(up, ".resnets.%zu", j);
            const path one = comfyui ? at(name, "upsamples.%zu", block) : own;
            const tensor y = widens ? upsample(w, &h, at(one, ".resample.1")) : resnet(w, f, &h, width[last - i], one);
            if (h.id != held.id) give(w, &h);
            h = y;
        }
        if (!comfyui) bind(w, &held, h);
    }
    if (!comfyui) held.id = EXTERNAL; /* h, which goes with the norm */
    finish(w, f, &h, a->out_channels, name);
    give(w, &held);
    return h;
}

tensor vm_walk_frame(walk *w, const tensor *x) {
    const size_t z = w->vae->arch->latent_channels;
    frame f = {0};
    tensor h, y;
    if (w->vae->op == VM_DECODE) {
        const bool comfyui = is_comfyui(w);
        const tensor latents = causal(w, x, z, 1, at((path){""}, comfyui ? "conv2" : "post_quant_conv"));
        h = decoder(w, &f, &latents);
        y = take_like(w, &h, at((path){""}, comfyui ? "decode [cat]" : "decode [clamp]"));
        forget(w, &f);
        give(w, &latents);
    } else {
        h = encoder(w, &f, x);
        y = causal(w, &h, 2 * z, 1, (path){"quant_conv"});
        if (w->vae->release < WITH_TILES) { /* mean and log-variance apart, and together again */
            const tensor moments = take_like(w, &y, (path){"encode [cat]"});
            forget(w, &f);
            give(w, &y);
            y = moments;
        } else {
            forget(w, &f);
        }
    }
    give(w, &h);
    return y;
}

/* The tile before it left its cache; a decode's latents and image, which is bound until the next one is there, or an
 * encode's moments. */
tensor vm_walk_frame_tile(walk *w, frame *f, const tensor *part) {
    const size_t z = w->vae->arch->latent_channels;
    forget(w, f);
    give(w, &f->named);
    if (w->vae->op == VM_DECODE) {
        f->named = causal(w, part, z, 1, (path){"post_quant_conv"});
        bind(w, &f->result, decoder(w, f, &f->named));
    } else {
        give(w, &f->result);
        const tensor h = encoder(w, f, part);
        f->result = causal(w, &h, 2 * z, 1, (path){"quant_conv"});
        give(w, &h);
    }
    return take_like(w, &f->result, (path){"cat"});
}

void vm_walk_frame_tiles_done(walk *w, frame *f) {
    forget(w, f);
    give(w, &f->named);
    f->named.id = EXTERNAL;
}

vm_status vm_walk_check_code(const vm_arch *arch, vm_trace_runtime runtime) {
    const bool comfyui = arch->family == VM_WAN;
    if (arch->family == VM_KL || runtime == VM_TORCH_DIFFUSERS || (comfyui && runtime == VM_TORCH_COMFYUI))
        return VM_OK;
    return vm_fail(VM_EINVAL, "runtime: want diffusers%s for %s, the only code of it that is followed, got %s",
                   comfyui ? " or comfyui" : "", arch->name, vm_trace_runtime_name[runtime]);
}

/* AutoencoderTiny's tiles, which take its shapes for granted. */
static vm_status check_tiny_tiles(const vm_trace_vae *v) {
    const vm_arch *a = v->arch;
    const size_t factor = vm_arch_factor(a), shared = (size_t)((double)v->tile * v->tile_overlap);
    const bool encodes = v->op == VM_ENCODE;
    if (a->levels != 4 || a->out_channels != 3)
        return vm_fail(VM_EINVAL,
                       "tile: want a factor of 8 and 3 channels, which AutoencoderTiny's tiles have, got %zu "
                       "and %zu",
                       factor, a->out_channels);
    if (encodes && a->latent_channels != 4)
        return vm_fail(VM_EINVAL,
                       "tile: want 4 latent channels, which AutoencoderTiny's tiled encode has, got the %zu "
                       "of %s, for which it raises",
                       a->latent_channels, a->name);
    if (encodes && shared % factor)
        return vm_fail(VM_EINVAL,
                       "tile_overlap: want a multiple of %zu pixels of a tile, or AutoencoderTiny raises, got "
                       "%zu of %zu",
                       factor, shared, v->tile);
    return VM_OK;
}

vm_status vm_walk_check_class(const vm_trace_vae *v) {
    const char *name = v->arch->name;
    vm_status s = vm_walk_check_code(v->arch, v->runtime);
    if (s) return s;
    if (v->channels_last && v->arch->family != VM_TINY)
        return vm_fail(VM_EINVAL,
                       "channels_last: want False for %s: PyTorch raises for its filters of five dimensions, got True",
                       name);
    if (v->sends || v->first != v->dtype)
        return vm_fail(VM_EINVAL, "%s: want it with another model than %s, whose submodules have none",
                       v->sends ? "sends" : "first", name);
    if (v->arch->family == VM_TINY) return v->tile ? check_tiny_tiles(v) : VM_OK;
    if (v->runtime == VM_TORCH_COMFYUI && (v->op == VM_ENCODE || v->tile || v->slicing))
        return vm_fail(VM_EINVAL,
                       "%s: want the decode of a whole %s in ComfyUI, the only part of its code that is followed",
                       v->op == VM_ENCODE ? "op"
                       : v->tile          ? "tile"
                                          : "slicing",
                       name);
    if ((v->tile || v->slicing) && v->release < WITH_TILES)
        return vm_fail(VM_EINVAL, "%s: want diffusers 0.%d or later for %s, got 0.%d, which has none",
                       v->tile ? "tile" : "slicing", WITH_TILES, name, v->release);
    return VM_OK;
}
