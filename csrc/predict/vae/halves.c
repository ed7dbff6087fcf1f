/* Encoders and decoders as lists of modules in the order of their calls, and the walk through one.
 *
 *   encode   conv_in | levels: resnets, resampler | mid: resnet attention resnet | norm activation conv_out
 *   decode   conv_in | mid | levels: resnets, resampler | norm activation conv_out
 *
 * Each family defines its modules (coders.c, vae_frames.c). This file decides which names hold a module's
 * input, and for how long. */
#include "walk.h"

/* ---- lists of modules ---- */

const names *vm_walk_names(const vm_arch *arch, vm_trace_runtime runtime) {
    static const names diffusers = {
        .mid = {"mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1"},
        .ends = {"conv_in", "conv_norm_out", "conv_out"},
        .level = {"down_blocks", "up_blocks"},
        .in_level = {"resnets", "downsamplers.0", "upsamplers.0"},
        .in_resnet = {"norm1", "conv1", "norm2", "conv2", "conv_shortcut"},
    };
    static const names compvis = {
        .mid = {"mid.block_1", "mid.attn_1", "mid.block_2"},
        .ends = {"conv_in", "norm_out", "conv_out"},
        .level = {"down", "up"},
        .in_level = {"block", "downsample", "upsample"},
        .in_resnet = {"norm1", "conv1", "norm2", "conv2", "nin_shortcut"},
        .by_size = true,
    };
    static const names comfyui = {
        .mid = {"middle.0", "middle.1", "middle.2"},
        .ends = {"conv1", "head.0", "head.2"},
        .level = {"downsamples", "upsamples"},
        .in_resnet = {"residual.0", "residual.2", "residual.3", "residual.6", "shortcut"},
    };
    return runtime == VM_TORCH_DIFFUSERS ? &diffusers : arch->family == VM_KL ? &compvis : &comfyui;
}

/* Returns: whether modules are numbered across all levels, so that a level is no module. */
static bool is_flat(const vm_arch *a, vm_trace_runtime runtime, vm_op op) {
    if (a->family == VM_KL) return false;
    return runtime != VM_TORCH_DIFFUSERS || a->family != VM_WAN || (op == VM_ENCODE && !a->residual);
}

/* Returns: channels after the resampler that follows a level of c channels. */
static uint64_t resampled(const vm_arch *a, vm_op op, size_t level, uint64_t c) {
    if (a->family == VM_HUNYUAN_IMAGE) return vm_arch_widths(a, op)[op == VM_DECODE ? level - 1 : level + 1];
    return a->family == VM_WAN && op == VM_DECODE && !a->residual ? c / 2 : c;
}

bool vm_walk_is_temporal(const vm_arch *a, size_t level) { return a->residual ? a->temporal[level] : level > 0; }

typedef struct list {
    size_t count;
    uint64_t c; /* channels of the last module's output */
    part *item;
} list;

static part *append(list *l, part_kind kind, size_t level, uint64_t c, path name) {
    part *p = &l->item[l->count++];
    *p = (part){.kind = kind, .level = level, .in = l->c, .out = c, .name = name};
    l->c = c;
    return p;
}

static path half_name(vm_op op) { return at((path){""}, op == VM_DECODE ? "decoder." : "encoder."); }

static void append_mid(list *l, const vm_arch *a, const names *n, path half) {
    append(l, RESNET, MID, l->c, at(half, "%s", n->mid[0]))->begins = true;
    if (a->mid_block_add_attention) append(l, ATTENTION, MID, l->c, at(half, "%s", n->mid[1]));
    append(l, RESNET, MID, l->c, at(half, "%s", n->mid[2]))->ends = true;
}

size_t vm_walk_parts(const vm_arch *a, vm_trace_runtime runtime, vm_op op, part item[MOST_PARTS]) {
    const bool decodes = op == VM_DECODE, flat = is_flat(a, runtime, op);
    const names *n = vm_walk_names(a, runtime);
    const size_t *width = vm_arch_widths(a, op), last = a->levels - 1, patch = VM_MAX(a->image_patch, 1);
    const uint64_t pixels = VM_PRODUCT64(decodes ? a->out_channels : a->in_channels, patch, patch);
    const size_t resnets = a->layers_per_block + decodes;
    const bool is_frames = a->family != VM_KL && runtime == VM_TORCH_DIFFUSERS;
    const path name = half_name(op);
    list l = {.c = decodes ? a->latent_channels : pixels, .item = item};
    append(&l, CONV_IN, BEGIN, width[decodes ? last : 0], at(name, "%s", n->ends[0]));
    if (decodes) append_mid(&l, a, n, name);
    for (size_t i = 0, number = 0; i <= last; i++) {
        const size_t level = decodes ? last - i : i, all = resnets + (i < last);
        const path top = at(name, "%s.%zu", n->level[decodes], n->by_size ? level : i);
        for (size_t j = 0; j < all; j++) {
            const bool resamples = j == resnets;
            path own = top;
            if (flat)
                own = at(name, "%s.%zu", n->level[decodes], number++);
            else if (!resamples)
                own = at(top, ".%s.%zu", n->in_level[0], j);
            else if (a->residual)
                own = at(top, decodes ? ".upsampler" : ".downsampler");
            else
                own = at(top, ".%s", n->in_level[1 + decodes]);
            part *p = append(&l, resamples ? RESAMPLER : RESNET, level,
                             resamples ? resampled(a, op, level, l.c) : width[level], own);
            p->begins = !j;
            p->ends = j + 1 == all;
        }
    }
    if (!decodes) append_mid(&l, a, n, name);
    append(&l, NORM_OUT, END, l.c, at(name, "%s", is_frames ? "norm_out" : n->ends[1]));
    append(&l, CONV_OUT, END, decodes ? pixels : 2 * a->latent_channels, at(name, "%s", n->ends[2]));
    return l.count;
}

/* ---- moves between channels and pixels ---- */

tensor vm_walk_moved(walk *w, const tensor *x, uint64_t c, uint64_t h, uint64_t wide, path name) {
    return take(w, x->n, c, h, wide, CONTIGUOUS, at(name, " [moved]"));
}

bool vm_walk_divides(walk *w, uint64_t all, uint64_t c, path name) {
    if (!w->status && all % c)
        w->status =
            vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "%s", "channels that are whole groups of %" PRIu64, "%" PRIu64),
                    name.text, c, all);
    return !w->status;
}

tensor vm_walk_average(walk *w, const tensor *x, uint64_t frames, uint64_t side, uint64_t c, path name) {
    const uint64_t all = VM_PRODUCT64(x->c, frames, side, side), h = x->h / side, wide = x->w / side;
    if (!vm_walk_divides(w, all, c, name)) return *x;
    tensor y = *x;
    if (is_wan(w)) y = take(w, x->n, VM_PRODUCT64(x->c, frames), x->h, x->w, x->layout, at(name, " [pad]"));
    if (side > 1 && (!is_wan(w) || h * wide > 1)) {
        const tensor moved = vm_walk_moved(w, x, all, h, wide, name);
        give_copy(w, &y, x);
        y = moved;
    } else if (is_wan(w) && side == 1 && y.layout == CHANNELS_LAST) {
        bind(w, &y, take_like(w, &y, at(name, " [reshaped]")));
    }
    const tensor mean = take(w, x->n, c, h, wide, CONTIGUOUS, at(name, " [mean]"));
    give_copy(w, &y, x);
    return mean;
}

tensor vm_walk_repeat(walk *w, const tensor *x, uint64_t frames, uint64_t side, uint64_t c, path name) {
    const uint64_t all = VM_PRODUCT64(c, frames, side, side);
    if (!vm_walk_divides(w, all, x->c, name)) return *x;
    tensor y = take(w, x->n, all, x->h, x->w, CONTIGUOUS, at(name, " [repeated]"));
    if (side > 1 && x->h * x->w > 1)
        bind(w, &y, vm_walk_moved(w, x, all / (side * side), x->h * side, x->w * side, name));
    y.c = c; /* the last frame, a view */
    y.h = x->h * side;
    y.w = x->w * side;
    return y;
}

void vm_walk_add(walk *w, tensor *h, tensor moved, path name) {
    const tensor y = take_like(w, h, at(name, " [sum]"));
    vm_trace_move(w->t, y.bytes);
    give(w, &moved);
    bind(w, h, y);
}

/* ---- the walk ---- */

/* Returns: whether diffusers' caller holds a module's input until it returns: a level's, or the middle's. */
static bool is_held(const walk *w, const part *p) {
    return w->frames->diffusers && (p->level == MID || !is_flat(w->vae->arch, w->vae->runtime, w->vae->op));
}

/* Returns: whether a module's input is held until the whole half returns. CompVis' encoder lists everything that its
 * levels make. ComfyUI has names for the parts of a video: one keeps the input of a decoder's levels, another the
 * output of the levels of an AutoencoderKL's encoder. */
static bool is_kept(const walk *w, const part *p) {
    const bool decodes = w->vae->op == VM_DECODE, begins_mid = p->begins && p->level == MID;
    if (w->frames->lists && !decodes) return p->level < BEGIN || begins_mid;
    if (!w->frames->rolls) return false;
    return decodes ? p->begins && p->level == w->vae->arch->levels - 1 : begins_mid && w->vae->arch->family == VM_KL;
}

static path level_name(const walk *w, const part *p) {
    const bool decodes = w->vae->op == VM_DECODE;
    return at(half_name(w->vae->op), "%s.%zu", vm_walk_names(w->vae->arch, w->vae->runtime)->level[decodes],
              decodes ? w->vae->arch->levels - 1 - p->level : p->level);
}

/* Adds a residual level's input to its output. */
static void add_begun(walk *w, const part *p, const tensor *begun, tensor *h) {
    const vm_arch *a = w->vae->arch;
    const path name = level_name(w, p), shortcut = at(name, ".avg_shortcut");
    const bool decodes = w->vae->op == VM_DECODE, resamples = p->kind == RESAMPLER;
    const uint64_t frames = resamples && vm_walk_is_temporal(a, p->level - decodes) ? 2 : 1, side = resamples ? 2 : 1;
    if (!decodes)
        vm_walk_add(w, h, vm_walk_average(w, begun, frames, side, h->c, shortcut), name);
    else if (resamples)
        vm_walk_add(w, h, vm_walk_repeat(w, begun, frames, side, h->c, shortcut), name);
    give(w, begun);
}

static tensor run(walk *w, frame *f, const blocks *b, const part *p, const tensor *x) {
    switch (p->kind) {
    case RESNET: return b->resnet(w, f, x, p->out, p->name);
    case ATTENTION: return b->attention(w, x, p->name);
    case RESAMPLER: return b->resample(w, f, x, p);
    case NORM_OUT: return b->norm(w, x, p->name);
    default: return b->conv(w, f, x, p->out, p->name);
    }
}

tensor vm_walk_half(walk *w, frame *f, const blocks *b, const tensor *x) {
    const vm_arch *a = w->vae->arch;
    const bool decodes = w->vae->op == VM_DECODE, adds = a->family == VM_HUNYUAN_IMAGE;
    const tensor none = {.id = EXTERNAL};
    const path half = half_name(w->vae->op), whole = at((path){""}, decodes ? "decoder" : "encoder");
    part part[MOST_PARTS];
    const size_t parts = vm_walk_parts(a, w->vae->runtime, w->vae->op, part);
    tensor h = *x, held = none, begun = none, kept[MOST_PARTS];
    size_t keeps = 0;
    begin(w, whole);
    for (size_t i = 0; i < parts; i++) {
        const struct part *p = &part[i];
        const bool is_residual = a->residual && p->level < BEGIN;
        const bool is_level = p->level < BEGIN;
        if (p->begins && is_level) begin(w, level_name(w, p));
        if (p->begins) held = is_held(w, p) ? h : none;
        if (p->begins && is_residual) begun = take_like(w, &h, at(level_name(w, p), " [clone]"));
        if (p->kind == CONV_OUT) b->activate(w, &h, part[i - 1].name);
        const tensor y = run(w, f, b, p, &h);
        if (is_kept(w, p))
            kept[keeps++] = h;
        else if (i && h.id != held.id)
            give(w, &h);
        h = y;
        if (adds && decodes && !i) vm_walk_add(w, &h, vm_walk_repeat(w, x, 1, 1, h.c, at(half, "repeated")), half);
        if (!p->ends) continue;
        if (is_residual) add_begun(w, p, &begun, &h);
        give(w, &held);
        held = none;
        if (is_level) end(w, level_name(w, p));
        if (p->level != MID) continue;
        if (adds && !decodes) begun = vm_walk_average(w, &h, 1, 1, 2 * a->latent_channels, at(half, "mean"));
        if (decodes && w->dtype != w->vae->dtype) {
            w->dtype = w->vae->dtype;
            bind(w, &h, take_like(w, &h, at((path){"decoder"}, " [to %s]", vm_dtype_name(w->dtype))));
        }
    }
    if (adds && !decodes) vm_walk_add(w, &h, begun, half);
    for (size_t i = 0; i < keeps; i++) give(w, &kept[i]);
    end(w, whole);
    return h;
}
