/* Frames of diffusers' AutoencoderKLWan and AutoencoderKLQwenImage, which are made for videos.
 *
 * They run an image as 3D. Every causal convolution copies its input into three frames, the first two zeros. A
 * convolution wider than a pixel also caches a clone of its input for later frames; these clones live until the call
 * ends. Norms are F.normalize, factor by factor.
 *
 * AutoencoderKLWan also decodes videos here: latent frame by latent frame. Then a convolution reads two cached frames
 * instead of zeros, and caches its input's last two. An upsampler may double the frames by a convolution to twice the
 * channels, except in the first latent frame. In a tensor the rows of all its frames count as rows (walk_frame.times).
 * Wan 2.1's also encodes videos: the first frame, then four at a time, which downsamplers halve by a convolution.
 *
 *            resnet: (1x1x1 shortcut) norm1 silu conv1 norm2 silu conv2 add
 *   encode   conv_in | levels: resnets, pad + strided conv | mid: resnet attention resnet | norm silu conv_out | 1x1x1
 *   decode   1x1x1 | conv_in | mid | levels: resnets, nearest 2x + conv to half the channels | norm silu conv_out clamp
 *
 * Residual ones (Wan 2.2's) clone a level's input, reshape it to the channels, frames and pixels of its output, and add
 * it. Their upsamplers keep the channels. Patches of 2x2 pixels are copies before the encoder and after the decoder.
 * AutoencoderKLQwenImage21 is the same with 2D convolutions.
 *
 * AutoencoderKLHunyuanImage has these blocks with GroupNorm, 2D convolutions, three projections and no cache. It
 * resamples by a convolution, then moves channels to pixels or back, and does the same with the convolution's input.
 *
 * Releases differ: vm_trace_vae.release selects one.
 *
 * ComfyUI's WanVAE (comfy/ldm/wan/vae.py since its #13014) caches nothing for one frame. Its convolutions copy the last
 * slice of their filters, and pad nothing; its decoder keeps the middle's output. */
#include "walk.h"

enum { WITH_TILES = 34, FLOAT_NORM = 38 };

static bool is_comfyui(const walk *w) { return w->vae->runtime == VM_TORCH_COMFYUI; }

static const tensor none = {.id = EXTERNAL};

/* Returns: the next module's cache; no frames when it is called first. */
static tensor recall(const frame *f) { return f->next < f->count ? f->cached[f->next] : none; }

/* Replaces it. */
static void keep(walk *w, frame *f, tensor recent) {
    if (f->next == MOST_CACHED) return;
    if (f->next < f->count)
        give(w, &f->cached[f->next]);
    else
        f->count++;
    f->cached[f->next++] = recent;
}

/* Clones the last two frames of x, or the last of `before` and x. */
static tensor recent_frames(walk *w, const frame *f, const tensor *x, const tensor *before, path name) {
    const path cache = at(name, " [cache]");
    const uint64_t rows = x->h / f->times;
    if (!is_wan(w) || is_comfyui(w)) return none;
    tensor recent = take(w, x->n, x->c, VM_MIN(f->times, 2) * rows, x->w, either(x) ? CONTIGUOUS : x->layout, cache);
    if (f->times < 2 && before->h) bind(w, &recent, take(w, x->n, x->c, 2 * rows, x->w, CONTIGUOUS, cache));
    return recent;
}

static void forget(walk *w, frame *f) {
    for (size_t i = 0; i < f->count; i++) give(w, &f->cached[i]);
    f->count = f->next = 0;
}

/* A causal convolution of `times` frames. Its filter has as many frames as `depth`, and `before` has frames before
 * those of x, instead of zeros. */
static tensor convolve(walk *w, uint64_t times, const tensor *x, const tensor *before, uint64_t k, uint64_t depth,
                       uint64_t side, path name) {
    const bool pads = !is_comfyui(w);
    const uint64_t border = pads ? side - 1 : 0, h = x->h / times + border, wide = x->w + border;
    if (!is_wan(w)) return conv(w, x, k, side, 1, side / 2, name);
    if (!w->vae->arch->slices) {
        const tensor padded = take(w, x->n, x->c, h, wide, x->layout, at(name, " [pad]"));
        const tensor y = conv(w, &padded, k, side, 1, 0, name);
        give(w, &padded);
        return y;
    }
    begin(w, name);
    const uint64_t all = pads ? times + depth - 1 : times;
    tensor copy = *x; /* of the input, or of the filters */
    if (before->h) copy = take(w, x->n, x->c, before->h + x->h, x->w, CONTIGUOUS, at(name, " [cat]"));
    const tensor joined = copy;
    const bool nhwc = x->layout == CHANNELS_LAST && (!before->h || before->layout == CHANNELS_LAST);
    const layout layout = depth == 1 || nhwc ? x->layout : CONTIGUOUS; /* without zeros it is a clone */
    if (pads) copy = take(w, x->n, VM_PRODUCT64(x->c, all), h, wide, layout, at(name, " [pad]"));
    if (before->h) give(w, &joined);
    const tensor in = dense(w, pads ? &copy : x, nhwc, name);
    const tensor y = take(w, x->n, k, x->h, x->w, nhwc ? CHANNELS_LAST : CONTIGUOUS, name);
    if (!pads && side > 1) copy = take(w, k, x->c, side, side, CONTIGUOUS, at(name, " [filter]"));
    tensor filter = none;
    if (nhwc && side > 1) filter = take(w, k, x->c * depth, side, side, CONTIGUOUS, at(name, " [filter]"));
    const int64_t shape[4] = {(int64_t)x->n, (int64_t)x->c, (int64_t)h, (int64_t)wide};
    vm_conv question = vm_conv_square(w->dtype, shape, (int64_t)k, (int64_t)side, 1, pads ? 0 : (int64_t)side / 2);
    question.tf32 = true;
    question.nhwc = nhwc;
    question.dims = 3;
    question.size[0] = (int64_t)all;
    if (pads) question.filter[0] = (int64_t)depth;
    if (!w->status) w->status = vm_trace_conv(w->t, &question, at(name, " [workspace]").text);
    if (filter.h) give(w, &filter);
    if (in.id != copy.id) give_copy(w, &in, x);
    give_copy(w, &copy, x);
    end(w, name);
    return y;
}

/* A convolution of single pixels of `times` frames. */
static tensor mix(walk *w, uint64_t times, const tensor *x, uint64_t k, path name) {
    return convolve(w, times, x, &none, k, 1, 1, name);
}

/* A causal convolution with its cache. */
static tensor remember_and_convolve(walk *w, frame *f, const tensor *x, uint64_t c, path name) {
    const tensor before = recall(f), recent = recent_frames(w, f, x, &before, name);
    const tensor y = convolve(w, f->times, x, &before, c, 3, 3, name);
    keep(w, f, recent);
    return y;
}

/* GroupNorm; or F.normalize(x) * scale * gamma + bias. From 0.38 on, half precision is normalised in float32, and a
 * name holds the result. */
static tensor normalise(walk *w, const tensor *x, path name) {
    if (!is_wan(w)) return norm(w, x, name);
    const bool named = w->vae->release >= FLOAT_NORM && !is_comfyui(w), widens = named && element(w) < 4;
    const uint64_t size = widens ? 4 : element(w);
    begin(w, name);
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
    end(w, name);
    return y;
}

static void silu(walk *w, tensor *x, path name) { bind(w, x, take_like(w, x, at(name, " [silu]"))); }

static tensor resnet(walk *w, frame *f, const tensor *x, uint64_t c, path name) {
    const bool comfyui = is_comfyui(w);
    const char *const *own = vm_walk_names(w->vae->arch, w->vae->runtime)->in_resnet;
    const path shortcut = at(name, ".%s", own[4]);
    tensor skip = *x;
    if (x->c != c && !comfyui) skip = mix(w, f->times, x, c, shortcut);
    tensor h = *x;
    for (int i = 0; i < 4; i += 2) {
        const path norm = at(name, ".%s", own[i]);
        const tensor normed = normalise(w, &h, norm);
        give_copy(w, &h, x);
        h = normed;
        silu(w, &h, norm);
        bind(w, &h, remember_and_convolve(w, f, &h, c, at(name, ".%s", own[i + 1])));
    }
    if (x->c != c && comfyui) skip = mix(w, f->times, x, c, shortcut);
    const tensor y = take_like(w, &h, name);
    vm_trace_move(w->t, y.bytes); /* reads two tensors */
    give_copy(w, &skip, x);
    give(w, &h);
    return y;
}

/* HunyuanImage's: three projections, and tensors of three dimensions, which no fused kernel accepts. */
static tensor attention_of_tokens(walk *w, const tensor *x, path name) {
    const tensor normed = norm(w, x, at(name, ".norm"));
    tensor own[3];
    for (int i = 0; i < 3; i++) own[i] = conv1(w, &normed, x->c, at(name, ".to_%c", "qkv"[i]));
    for (int i = 0; i < 3; i++) {
        const tensor by_token = dense(w, &own[i], true, at(name, ".to_%c", "qkv"[i]));
        give_copy(w, &own[i], &by_token);
        own[i] = by_token;
    }
    tensor h = vm_walk_attend(w, x, 3, name);
    give(w, &normed);
    h.layout = h.c > 1 ? CHANNELS_LAST : CONTIGUOUS; /* a permutation of (N, H, W, C) */
    bind(w, &h, conv1(w, &h, x->c, at(name, ".proj")));
    const tensor y = take_like(w, &h, at(name, " [sum]"));
    vm_trace_move(w->t, y.bytes);
    give(w, &h);
    for (int i = 0; i < 3; i++) give(w, &own[i]);
    return y;
}

static tensor attention(walk *w, const tensor *x, path name) {
    if (!is_wan(w)) return attention_of_tokens(w, x, name);
    const tensor normed = normalise(w, x, at(name, ".norm"));
    tensor qkv = conv1(w, &normed, 3 * x->c, at(name, ".to_qkv")), own[3];
    const bool copies = x->h * x->w > 1, comfyui = is_comfyui(w);
    const path by_token = at(name, " [q, k, v by token]");
    for (int i = 0; copies && comfyui && i < 3; i++)
        own[i] = take_like(w, x, by_token); /* of a function that returns */
    if (copies && !comfyui && qkv.layout != CHANNELS_LAST) bind(w, &qkv, take_like(w, &qkv, by_token));
    tensor h = vm_walk_attend(w, x, 4, name);
    for (int i = 0; copies && comfyui && i < 3; i++) give(w, &own[i]);
    give(w, &normed);
    h.layout = x->c > 1 && x->h * x->w == 1 ? CHANNELS_LAST : vm_walk_seen(x);
    bind(w, &h, conv1(w, &h, x->c, at(name, ".proj")));
    tensor y = take(w, x->n, x->c, x->h, x->w, CONTIGUOUS, at(name, " [sum]"));
    if (h.layout == CHANNELS_LAST && !either(x)) /* five dimensions are not channels_last */
        y.layout = w->vae->arch->slices ? CHANNELS_LAST_ONE : CHANNELS_LAST;
    vm_trace_move(w->t, y.bytes);
    give(w, &qkv);
    give(w, &h);
    return y;
}

/* HunyuanImage's resamplers, to c channels. */
static tensor shuffle(walk *w, const tensor *x, uint64_t c, bool down, path name) {
    const uint64_t h = down ? x->h / 2 : x->h * 2, wide = down ? x->w / 2 : x->w * 2;
    if (down && !vm_walk_divides(w, c, 4, name)) return *x;
    tensor y = conv3(w, x, down ? c / 4 : 4 * c, at(name, ".conv"));
    if (down || x->h * x->w > 1)
        bind(w, &y, vm_walk_moved(w, &y, c, h, wide, name));
    else
        y = (tensor){.id = y.id, .n = y.n, .c = c, .h = h, .w = wide, .layout = CHANNELS_LAST, .bytes = y.bytes};
    tensor moved = down ? vm_walk_average(w, x, 1, 2, c, name) : vm_walk_repeat(w, x, 1, 2, c, name);
    if (!down) moved.layout = y.layout;
    vm_walk_add(w, &y, moved, name);
    return y;
}

/* ---- resamplers, encoder and decoder ---- */

/* diffusers upsamples in float32. */
static tensor upsample(walk *w, const tensor *x, uint64_t c, path name) {
    const bool widens = element(w) < 4 && !is_comfyui(w);
    const uint64_t size = widens ? 4 : element(w);
    const bool by_frame = x->layout == BY_FRAME;
    tensor in = *x;
    if (widens)
        in = take_sized(w, x->n, x->c, x->h, x->w, by_frame ? BY_FRAME : CONTIGUOUS, size, at(name, " [float]"));
    const layout layout = x->layout == CHANNELS_LAST ? CHANNELS_LAST : CONTIGUOUS;
    tensor wide = take_sized(w, x->n, x->c, 2 * x->h, 2 * x->w, layout, size, at(name, " [nearest 2x]"));
    if (by_frame) {
        const tensor copy = take_sized(w, x->n, x->c, x->h, x->w, CONTIGUOUS, size, at(name, " [contiguous]"));
        give(w, &copy);
    }
    give_copy(w, &in, x);
    if (widens) bind(w, &wide, take_like(w, &wide, at(name, " [nearest 2x, to %s]", vm_dtype_name(w->dtype))));
    const tensor y = conv3(w, &wide, c, name);
    give(w, &wide);
    return y;
}

/* Doubles the frames, after the first latent frame. In the second one its cache has no frames yet. */
static tensor double_frames(walk *w, frame *f, const tensor *x, path name) {
    const tensor before = recall(f);
    if (f->next == f->count) {
        keep(w, f, none);
        return *x;
    }
    tensor recent = recent_frames(w, f, x, &before, name);
    if (f->times < 2 && !before.h) { /* joins zeros and its clone */
        const tensor zeros = take_like(w, &recent, at(name, " [zeros]"));
        const tensor joined = take(w, x->n, x->c, 2 * x->h, x->w, CONTIGUOUS, at(name, " [cache]"));
        give(w, &zeros);
        bind(w, &recent, joined);
    }
    const tensor y = convolve(w, f->times, x, &before, 2 * x->c, 3, 1, name);
    keep(w, f, recent);
    const tensor stacked = take(w, x->n, x->c, 2 * x->h, x->w, CONTIGUOUS, at(name, " [stack]"));
    give(w, &y);
    f->times *= 2;
    return stacked;
}

/* Halves the frames, after the first one. A clone of the last frame precedes the next ones. */
static tensor halve_frames(walk *w, frame *f, const tensor *x, path name) {
    const tensor before = recall(f);
    if (!before.h) {
        keep(w, f, recent_frames(w, f, x, &before, name));
        return *x;
    }
    tensor last = *x;
    last.h /= f->times;
    const uint64_t all = f->times + 1;
    const tensor recent = take_like(w, &last, at(name, " [cache]"));
    const bool nhwc = x->layout == CHANNELS_LAST && before.layout == CHANNELS_LAST;
    const layout layout = nhwc ? CHANNELS_LAST : CONTIGUOUS;
    const tensor joined = take(w, x->n, x->c, all * last.h, x->w, layout, at(name, " [cat]"));
    begin(w, name);
    const tensor copy = take_like(w, &joined, at(name, " [pad]")); /* of no rows: a clone */
    f->times /= 2;
    const tensor y = take(w, x->n, x->c, f->times * last.h, x->w, layout, name);
    tensor filter = none;
    if (nhwc) filter = take(w, x->c, x->c * 3, 1, 1, CONTIGUOUS, at(name, " [filter]"));
    const int64_t shape[4] = {(int64_t)x->n, (int64_t)x->c, (int64_t)last.h, (int64_t)last.w};
    vm_conv question = vm_conv_square(w->dtype, shape, (int64_t)x->c, 1, 1, 0);
    question.tf32 = true;
    question.dims = 3;
    question.size[0] = (int64_t)all;
    question.filter[0] = 3;
    question.stride[0] = 2;
    question.nhwc = nhwc;
    if (!w->status) w->status = vm_trace_conv(w->t, &question, at(name, " [workspace]").text);
    if (nhwc) give(w, &filter);
    give(w, &copy);
    end(w, name);
    give(w, &joined);
    keep(w, f, recent);
    give(w, x);
    return y;
}

/* The frames of x as images: of one video, or with a picture's strides, a view; otherwise a copy. */
static tensor as_images(walk *w, const frame *f, const tensor *x, path name) {
    tensor images = *x;
    if (x->n > 1 && x->layout != CHANNELS_LAST)
        images = take(w, x->n, x->c, x->h, x->w, CONTIGUOUS, at(name, " [images]"));
    else if (x->layout != CHANNELS_LAST)
        images.layout = BY_FRAME;
    images.n *= f->times;
    images.h /= f->times;
    return images;
}

static tensor downsample(walk *w, frame *f, const tensor *x, path name) {
    const path own = at(name, ".resample.1");
    if (f->times == 1) {
        tensor image = *x; /* PyTorch does not recognise the strides of a single image as channels_last */
        if (x->n == 1) image.layout = CONTIGUOUS;
        tensor y = vm_walk_downsample(w, &image, own);
        /* nor those of the frames that are made of the images again */
        if (w->vae->arch->slices && y.layout == CHANNELS_LAST) y.layout = CHANNELS_LAST_ONE;
        return y;
    }
    tensor images = as_images(w, f, x, name), padded = images;
    if (images.layout == BY_FRAME) padded.layout = CONTIGUOUS; /* as zeros make it */
    tensor y = vm_walk_downsample(w, &padded, own);
    give_copy(w, &images, x);
    y.n = x->n;
    y.h *= f->times;
    if (y.layout != CHANNELS_LAST) y.layout = BY_FRAME;
    return y;
}

static tensor resample(walk *w, frame *f, const tensor *x, const part *p) {
    const bool down = w->vae->op == VM_ENCODE, temporal = vm_walk_is_temporal(w->vae->arch, p->level - !down);
    const path own = at(p->name, ".resample.1"), over_frames = at(p->name, ".time_conv");
    if (!is_wan(w)) return shuffle(w, x, p->out, down, p->name);
    if (down) {
        const tensor y = downsample(w, f, x, p->name);
        return temporal ? halve_frames(w, f, &y, over_frames) : y;
    }
    tensor in = *x;
    if (temporal && w->vae->frames > 1) in = double_frames(w, f, x, over_frames);
    if (f->times == 1) return upsample(w, &in, p->out, own);
    const tensor images = as_images(w, f, &in, p->name);
    if (images.id != in.id) give_copy(w, &in, x);
    tensor y = upsample(w, &images, p->out, own);
    give_copy(w, &images, x);
    y.n = x->n;
    y.h *= f->times;
    y.layout = BY_FRAME;
    return y;
}

/* Encoder or decoder, of an image, of a latent frame, or of four frames. */
static tensor half(walk *w, frame *f, const tensor *x, uint64_t times) {
    static const blocks own = {remember_and_convolve, resnet, attention, resample, normalise, silu};
    f->next = 0;
    f->times = times;
    return vm_walk_half(w, f, &own, x);
}

tensor vm_walk_patch(walk *w, const tensor *x, bool back) {
    const uint64_t c = back ? x->c / 4 : x->c * 4, h = back ? x->h * 2 : x->h / 2, wide = back ? x->w * 2 : x->w / 2;
    return take(w, x->n, c, h, wide, CONTIGUOUS, at((path){""}, back ? "unpatchify" : "patchify"));
}

/* Encoder or decoder for the i-th frame of latents. */
static tensor half_of_latent_frame(walk *w, frame *f, const tensor *one, uint64_t i) {
    const uint64_t times = w->vae->op == VM_ENCODE && i ? 4 : 1;
    tensor x = *one;
    x.h *= times;
    return half(w, f, &x, times);
}

/* Encoder or decoder for each frame of latents, with the result so far in a new tensor each time. */
static tensor half_by_frames(walk *w, frame *f, const tensor *one) {
    const path cat = at((path){""}, "%s [cat of frames]", w->vae->op == VM_ENCODE ? "encode" : "decode");
    tensor all = half_of_latent_frame(w, f, one, 0);
    for (uint64_t i = 1; !w->status && i < w->vae->frames; i++) {
        bind(w, &f->result, half_of_latent_frame(w, f, one, i));
        bind(w, &all, take(w, all.n, all.c, all.h + f->result.h, all.w, CONTIGUOUS, cat));
    }
    return all;
}

tensor vm_walk_frame(walk *w, const tensor *x) {
    const uint64_t z = w->vae->arch->latent_channels;
    const bool patches = w->vae->arch->image_patch;
    frame f = {.result = none};
    tensor h, y;
    if (!is_wan(w)) return half(w, &f, x, 1);
    if (w->vae->op == VM_DECODE) {
        const bool comfyui = is_comfyui(w);
        tensor rows = *x;
        rows.h *= w->vae->frames;
        const tensor latents = mix(w, w->vae->frames, &rows, z, at((path){""}, comfyui ? "conv2" : "post_quant_conv"));
        tensor one = latents;
        one.h /= w->vae->frames;
        h = half_by_frames(w, &f, &one);
        if (patches) bind(w, &h, vm_walk_patch(w, &h, true));
        y = take_like(w, &h, at((path){""}, comfyui ? "decode [cat]" : "decode [clamp]"));
        forget(w, &f);
        give(w, &latents);
        give(w, &f.result);
    } else {
        const tensor image = patches ? vm_walk_patch(w, x, false) : *x;
        h = half_by_frames(w, &f, &image);
        y = mix(w, w->vae->frames, &h, 2 * z, at((path){""}, is_comfyui(w) ? "conv1" : "quant_conv"));
        if (w->vae->release < WITH_TILES) { /* splits mean and log-variance, and joins them again */
            const tensor moments = take_like(w, &y, (path){"encode [cat]"});
            forget(w, &f);
            give(w, &y);
            y = moments;
        } else {
            forget(w, &f);
        }
        give_copy(w, &image, x);
        give(w, &f.result);
    }
    if (y.id != h.id) give(w, &h);
    return y;
}

/* A tile's decode or encode, with a list of its latent frames' results. The last one is bound until the next one
 * exists; an encode's until the next one begins. */
static uint64_t half_of_tile(walk *w, frame *f, const tensor *part) {
    const uint64_t z = w->vae->arch->latent_channels;
    const bool decodes = w->vae->op == VM_DECODE;
    uint64_t rows = 0;
    for (size_t i = 0; i < f->parts; i++) give(w, &f->part[i]);
    f->parts = 0;
    if (!decodes) {
        give(w, &f->result);
        f->result = none;
    }
    for (uint64_t i = 0; !w->status && i < w->vae->frames; i++) {
        tensor image;
        if (decodes) {
            give(w, &f->named);
            f->named = mix(w, 1, part, z, (path){"post_quant_conv"});
            image = half(w, f, &f->named, 1);
        } else {
            const tensor h = half_of_latent_frame(w, f, part, i);
            image = mix(w, 1, &h, 2 * z, (path){"quant_conv"});
            give(w, &h);
        }
        if (i)
            f->part[f->parts++] = f->result;
        else
            give(w, &f->result);
        f->result = image;
        rows += image.h;
    }
    return rows;
}

/* The tile before has left its cache. A decode also leaves latents and image, bound until the next ones exist; an
 * encode leaves its moments. The frames of a tile count as channels. */
tensor vm_walk_frame_tile(walk *w, frame *f, const tensor *part) {
    forget(w, f);
    const uint64_t rows = half_of_tile(w, f, part);
    const tensor *y = &f->result;
    if (w->status) return *part;
    return take(w, y->n, y->c * (rows * f->times / y->h), y->h / f->times, y->w, CONTIGUOUS, (path){"cat"});
}

void vm_walk_frame_tiles_done(walk *w, frame *f) {
    forget(w, f);
    give(w, &f->named);
    f->named.id = EXTERNAL;
}

vm_status vm_walk_check_code(const vm_arch *arch, vm_trace_runtime runtime) {
    const bool comfyui = arch->family == VM_WAN && arch->slices && !arch->residual;
    if (arch->family == VM_LTX)
        return vm_fail(VM_EINVAL, VM_EXPECTED("arch", "a VAE whose calls in PyTorch are followed", "%s"), arch->name);
    if (arch->family == VM_KL || runtime == VM_TORCH_DIFFUSERS || (comfyui && runtime == VM_TORCH_COMFYUI))
        return VM_OK;
    return vm_fail(VM_EINVAL, VM_EXPECTED("runtime", "diffusers%s for %s, the only code of it that is followed", "%s"),
                   comfyui ? " or comfyui" : "", arch->name, vm_trace_runtime_name[runtime]);
}

/* AutoencoderTiny's tiles assume its shapes. */
static vm_status check_tiny_tiles(const vm_trace_vae *v) {
    const vm_arch *a = v->arch;
    const uint64_t factor = vm_arch_factor(a), shared = (uint64_t)((double)v->tile * v->tile_overlap);
    const bool encodes = v->op == VM_ENCODE;
    if (a->levels != 4 || a->out_channels != 3)
        return vm_fail(VM_EINVAL,
                       VM_EXPECTED("tile", "a factor of 8 and 3 channels, which AutoencoderTiny's tiles have",
                                   "%" PRIu64 " and %zu"),
                       factor, a->out_channels);
    if (encodes && a->latent_channels != 4)
        return vm_fail(VM_EINVAL,
                       VM_EXPECTED("tile", "4 latent channels, which AutoencoderTiny's tiled encode has",
                                   "the %zu of %s, for which it raises"),
                       a->latent_channels, a->name);
    if (encodes && shared % factor)
        return vm_fail(
            VM_EINVAL,
            VM_EXPECTED("tile_overlap", "a multiple of %" PRIu64 " pixels of a tile, or AutoencoderTiny raises",
                        "%" PRIu64 " of %" PRIu64),
            factor, shared, v->tile);
    return VM_OK;
}

vm_status vm_walk_check_class(const vm_trace_vae *v) {
    const char *name = v->arch->name;
    vm_status s = vm_walk_check_code(v->arch, v->runtime);
    if (s) return s;
    if (v->channels_last && v->arch->family != VM_TINY)
        return vm_fail(VM_EINVAL, VM_EXPECTED("channels_last", "False for %s%s", "True"), name,
                       v->arch->slices ? ": PyTorch raises for its filters of five dimensions"
                                       : ", which is followed only in PyTorch's usual format");
    if (v->arch->family == VM_HUNYUAN_IMAGE && v->tile && v->op == VM_ENCODE)
        return vm_fail(
            VM_EINVAL,
            VM_EXPECTED("tile", "None for the encode of %s: its class needs five dimensions and raises in tiles", ""),
            name);
    const bool has_modules = v->arch->family == VM_WAN && v->arch->slices && v->runtime == VM_TORCH_DIFFUSERS;
    if ((v->passing.count && !has_modules) || v->first != v->dtype)
        return vm_fail(VM_EINVAL, VM_EXPECTED("%s", "another model than %s, whose submodules have none", ""),
                       v->first == v->dtype ? "passing" : "first", name);
    if (v->arch->family == VM_TINY) return v->tile ? check_tiny_tiles(v) : VM_OK;
    if (v->runtime == VM_TORCH_COMFYUI && v->op == VM_ENCODE && v->batch > 1)
        return vm_fail(
            VM_EINVAL,
            VM_EXPECTED("batch", "1, because ComfyUI encodes a batch with %s as frames of a video", "%" PRIu64), name,
            v->batch);
    if (v->runtime == VM_TORCH_COMFYUI && v->slicing)
        return vm_fail(VM_EINVAL, VM_EXPECTED("slicing", "the diffusers runtime", "comfyui"));
    const uint64_t cells = vm_arch_factor(v->arch) / VM_MAX(v->arch->image_patch, 1);
    const uint64_t stride = (uint64_t)((double)v->tile * (1 - v->tile_overlap));
    if (v->arch->residual && v->op == VM_ENCODE && stride % cells)
        return vm_fail(
            VM_EINVAL,
            VM_EXPECTED("tile_overlap",
                        "tiles every so many pixels that %" PRIu64 " divides, or the class of %s raises", "%" PRIu64),
            cells, name, stride);
    if ((v->tile || v->slicing) && v->release < WITH_TILES)
        return vm_fail(VM_EINVAL, VM_EXPECTED("%s", "diffusers 0.%d or later for %s", "0.%d, which has none"),
                       v->tile ? "tile" : "slicing", WITH_TILES, name, v->release);
    return VM_OK;
}
