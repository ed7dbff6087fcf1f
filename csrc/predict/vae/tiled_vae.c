/* The halves of CompVis' VAE as A1111's extension Tiled VAE runs them in its fast mode, the default
 * (multidiffusion-upscaler-for-automatic1111, scripts/tilevae.py and tile_utils/attn.py).
 *
 * The blocks become a queue of tasks on one name, tile. It runs once on the input shrunk to a tile's side, to learn the
 * statistics of every norm, then on each tile with its padding; batch_norm with those statistics replaces GroupNorm.
 * SiLU and sums are in place. The worker's name res holds the last residual until the next one is stored, in another
 * block or another tile. The whole result stays in float32 until it is complete. */
#include "walk.h"

enum { MOST_NORMS = 2 * VM_MAX_LEVELS * (VM_MAX_LAYERS + 1) + 6 };

typedef struct worker {
    walk *w;
    tensor tile, res;
    bool learns; /* only the task that adds a residual holds it; the last norm ends it */
    size_t kept;
    tensor statistics[2 * MOST_NORMS]; /* the learnt ones */
} worker;

/* tile = y */
static void next(worker *k, tensor y) {
    if (k->tile.id != k->res.id) give(k->w, &k->tile);
    k->tile = y;
}

static void store(worker *k, tensor res) {
    if (k->res.id != k->tile.id) give(k->w, &k->res);
    k->res = res;
}

/* tile += res */
static void add(worker *k) {
    vm_trace_move(k->w->t, 3 * k->tile.bytes);
    if (!k->learns) return;
    give(k->w, &k->res);
    k->res.id = EXTERNAL;
}

static void learn(worker *k, path name) {
    const uint64_t groups = k->w->vae->arch->norm_num_groups;
    for (int i = 0; k->learns && i < 2; i++) /* variance and mean */
        k->statistics[k->kept++] = take(k->w, k->tile.n, groups, 1, 1, CONTIGUOUS, at(name, " [statistics]"));
}

/* batch_norm, with a temporary mean and deviation, then products and sums in place. */
static void apply_norm(worker *k, path name) {
    learn(k, name);
    const tensor in = contiguous(k->w, &k->tile, name), y = take_like(k->w, &in, name);
    tensor saved[2];
    for (int i = 0; i < 2; i++)
        saved[i] = take_sized(k->w, y.n, k->w->vae->arch->norm_num_groups, 1, 1, CONTIGUOUS, 4, at(name, " [saved]"));
    for (int i = 0; i < 2; i++) give(k->w, &saved[i]);
    give_copy(k->w, &in, &k->tile);
    vm_trace_move(k->w->t, 6 * y.bytes); /* multiplied, shifted and activated in place */
    next(k, y);
}

static void resnet(worker *k, uint64_t c, path name) {
    store(k, k->tile.c == c ? k->tile : conv1(k->w, &k->tile, c, at(name, ".nin_shortcut")));
    for (int i = 1; i <= 2; i++) {
        apply_norm(k, at(name, ".norm%d", i));
        next(k, conv3(k->w, &k->tile, c, at(name, ".conv%d", i)));
    }
    add(k);
}

static void attend(worker *k, path name) {
    store(k, k->tile);
    apply_norm(k, at(name, ".norm"));
    next(k, vm_walk_attention_of_tile(k->w, &k->tile, name));
    add(k);
}

/* Runs the queue on x; transfers x to the worker. */
static void run(worker *k, tensor x) {
    const bool decodes = k->w->vae->op == VM_DECODE;
    part part[MOST_PARTS];
    const size_t parts = vm_walk_parts(k->w->vae->arch, VM_TORCH_A1111, k->w->vae->op, part);
    k->tile = x;
    for (size_t i = 0; i < parts; i++) {
        const struct part *p = &part[i];
        if (p->kind == RESNET) {
            resnet(k, p->out, p->name);
        } else if (p->kind == ATTENTION) {
            attend(k, p->name);
        } else if (p->kind == RESAMPLER) {
            next(k, (decodes ? vm_walk_upsample : vm_walk_downsample)(k->w, &k->tile, at(p->name, ".conv")));
        } else if (p->kind != NORM_OUT) {
            next(k, conv3(k->w, &k->tile, p->out, p->name));
        } else if (k->learns) {
            learn(k, p->name);
            give(k->w, &k->tile);
            return;
        } else {
            apply_norm(k, p->name);
        }
    }
}

uint64_t vm_walk_pad(const vm_trace_vae *vae) { return vae->op == VM_DECODE ? 11 : 32; }

/* Returns: side of a tile without its padding: even parts, rounded up to 32 or a smaller power of two, up to `most`. */
static uint64_t side_of(uint64_t side, uint64_t pad, uint64_t most, uint64_t *count) {
    const uint64_t inner = side > 2 * pad ? side - 2 * pad : 0;
    *count = VM_MAX((inner + most - 1) / most, 1);
    const uint64_t even = (inner + *count - 1) / *count;
    for (uint64_t n = 32; n >= 2 && even % n; n /= 2)
        if (VM_ROUND_UP(even, n) <= most) return VM_ROUND_UP(even, n);
    return even;
}

/* Shrinks the input to a longer side of one tile, with its old mean and deviation. */
static tensor shrink(walk *w, const tensor *x, uint64_t most) {
    const double scale = (double)most / (double)VM_MAX(x->h, x->w);
    const uint64_t h = (uint64_t)((double)x->h * scale), wide = (uint64_t)((double)x->w * scale);
    tensor y = take(w, x->n, x->c, VM_MAX(h, 1), VM_MAX(wide, 1), x->layout, (path){"shrunk"});
    tensor scaled = take_like(w, &y, (path){"shrunk [scaled]"});
    for (int i = 0; i < 3; i++) bind(w, &scaled, take_like(w, &scaled, (path){"shrunk [scaled]"}));
    bind(w, &y, scaled);
    return y;
}

tensor vm_walk_tiled_vae(walk *w, const tensor *x) {
    const bool decodes = w->vae->op == VM_DECODE;
    const uint64_t factor = vm_arch_factor(w->vae->arch), pad = vm_walk_pad(w->vae);
    const uint64_t most = decodes ? w->vae->tile / factor : w->vae->tile;
    const uint64_t high = decodes ? x->h * factor : x->h / factor, wide = decodes ? x->w * factor : x->w / factor;
    worker learner = {.w = w, .res = {.id = EXTERNAL}, .learns = true};
    const tensor shrunk = shrink(w, x, most);
    tensor named = shrunk;
    named.id = EXTERNAL; /* another function owns the shrunk input */
    run(&learner, named);
    give(w, &shrunk);
    worker k = {.w = w, .res = {.id = EXTERNAL}};
    uint64_t rows, cols;
    const uint64_t side[2] = {side_of(x->h, pad, most, &rows), side_of(x->w, pad, most, &cols)};
    tensor result = {.id = EXTERNAL};
    for (uint64_t i = 0; !w->status && i < rows * cols; i++) {
        const uint64_t top = i / cols * side[0], left = i % cols * side[1];
        const uint64_t h = VM_MIN(side[0] + 2 * pad, x->h - top), v = VM_MIN(side[1] + 2 * pad, x->w - left);
        run(&k, take(w, x->n, x->c, h, v, x->layout, (path){"tile"}));
        if (!i) result = take_sized(w, x->n, k.tile.c, high, wide, CONTIGUOUS, 4, (path){"result [float]"});
        give(w, &k.tile);
    }
    if (element(w) < 4) bind(w, &result, take(w, x->n, result.c, high, wide, CONTIGUOUS, (path){"result"}));
    give(w, &k.res);
    for (size_t i = 0; i < learner.kept; i++) give(w, &learner.statistics[i]);
    return result;
}
