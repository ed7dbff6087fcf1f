/* The parameters of the VAEs in the order in which Module.to moves them: submodules in the order in which
 * __init__ assigns them, then a module's own parameters, weight before bias. The order decides which small
 * leftovers of segments remain. */
#include "walk.h"

typedef struct list {
    vm_parameters *found;
    const vm_arch *arch;
    vm_trace_runtime runtime;
    bool diffusers;
    vm_status status;
} list;

static void add(list *l, path name, const char *own, vm_parameter p) {
    vm_parameters *f = l->found;
    void *items = f->item;
    if (!l->status) l->status = vm_mem_grow(vm_mem_common, VM_SCRATCH, &items, f->count, sizeof *f->item);
    f->item = items;
    if (l->status) return;
    snprintf(p.name, sizeof p.name, "%.50s.%s", name.text, own);
    f->item[f->count++] = p;
}

static void vector(list *l, path name, const char *own, uint64_t c) {
    add(l, name, own, (vm_parameter){.dims = 1, .shape = {c}});
}

/* Without a bias. */
static void bare(list *l, uint64_t in, uint64_t out, uint64_t side, path name) {
    add(l, name, "weight", (vm_parameter){.dims = 4, .shape = {out, in, side, side}});
}

static void filters(list *l, uint64_t in, uint64_t out, uint64_t side, path name) {
    bare(l, in, out, side, name);
    vector(l, name, "bias", out);
}

static void pointwise(list *l, uint64_t c, path name) { filters(l, c, c, 1, name); }

static void linear(list *l, uint64_t c, path name) {
    add(l, name, "weight", (vm_parameter){.dims = 2, .shape = {c, c}});
    vector(l, name, "bias", c);
}

static void group_norm(list *l, uint64_t c, path name) {
    vector(l, name, "weight", c);
    vector(l, name, "bias", c);
}

/* No parameters: its running mean and variance, and its count of batches. */
static void batch_norm(list *l, uint64_t c, path name) {
    vector(l, name, "running_mean", c);
    vector(l, name, "running_var", c);
    add(l, name, "num_batches_tracked", (vm_parameter){.integer = true});
}

/* A filter of `frames` slices, if the model has slices. */
static void cube(list *l, uint64_t in, uint64_t out, uint64_t frames, uint64_t side, path name) {
    if (!l->arch->slices) {
        filters(l, in, out, side, name);
        return;
    }
    add(l, name, "weight", (vm_parameter){.dims = 5, .shape = {out, in, frames, side, side}});
    vector(l, name, "bias", out);
}

static void scales(list *l, uint64_t c, int dims, path name) {
    if (l->arch->family == VM_WAN)
        add(l, name, "gamma", (vm_parameter){.dims = dims, .shape = {c, 1, 1, 1}});
    else
        group_norm(l, c, name);
}

static void resnet(list *l, uint64_t in, uint64_t out, path name) {
    const char *const *own = vm_walk_names(l->arch, l->runtime)->in_resnet;
    scales(l, in, 4, at(name, ".%s", own[0]));
    cube(l, in, out, 3, 3, at(name, ".%s", own[1]));
    scales(l, out, 4, at(name, ".%s", own[2]));
    cube(l, out, out, 3, 3, at(name, ".%s", own[3]));
    if (in != out) cube(l, in, out, 1, 1, at(name, ".%s", own[4]));
}

static void attention(list *l, uint64_t c, path name) {
    const bool is_kl = l->arch->family == VM_KL, is_linear = is_kl && l->diffusers;
    scales(l, c, 3, at(name, is_linear ? ".group_norm" : ".norm"));
    if (l->arch->family == VM_WAN) filters(l, c, 3 * c, 1, at(name, ".to_qkv"));
    for (int i = 0; l->arch->family != VM_WAN && i < 3; i++)
        (is_linear ? linear : pointwise)(l, c, at(name, is_kl && !is_linear ? ".%c" : ".to_%c", "qkv"[i]));
    (is_linear ? linear : pointwise)(l, c, at(name, is_linear ? ".to_out.0" : is_kl ? ".proj_out" : ".proj"));
}

static void resampler(list *l, vm_op op, const part *p) {
    const bool decodes = op == VM_DECODE, is_wan = l->arch->family == VM_WAN;
    const bool shuffles = l->arch->family == VM_HUNYUAN_IMAGE;
    const uint64_t out = !shuffles ? p->out : decodes ? 4 * p->out : p->out / 4;
    filters(l, p->in, out, 3, at(p->name, is_wan ? ".resample.1" : ".conv"));
    if (is_wan && vm_walk_is_temporal(l->arch, p->level - decodes))
        cube(l, p->in, decodes ? 2 * p->in : p->in, 3, 1, at(p->name, ".time_conv"));
}

static void add_part(list *l, vm_op op, const part *p) {
    if (p->kind == RESNET)
        resnet(l, p->in, p->out, p->name);
    else if (p->kind == ATTENTION)
        attention(l, p->in, p->name);
    else if (p->kind == RESAMPLER)
        resampler(l, op, p);
    else if (p->kind == NORM_OUT)
        scales(l, p->in, 4, p->name);
    else
        cube(l, p->in, p->out, 3, 3, p->name);
}

/* The modules of a level or of the middle. diffusers has one list for attentions and one for resnets. */
static void add_level(list *l, vm_op op, const part *part, size_t parts, size_t level) {
    const bool apart = level == MID && l->diffusers;
    const part_kind first = l->arch->family == VM_HUNYUAN_IMAGE ? RESNET : ATTENTION;
    for (int pass = 0; pass < (apart ? 2 : 1); pass++)
        for (size_t i = 0; i < parts; i++) {
            const bool is_now = !apart || (pass ? part[i].kind != first : part[i].kind == first);
            if (part[i].level == level && is_now) add_part(l, op, &part[i]);
        }
}

/* An encoder or a decoder. The decoder of diffusers' AutoencoderKL assigns its middle after the levels; CompVis' lists
 * levels from the image's on. */
static void half(list *l, vm_op op) {
    const bool by_use = op == VM_DECODE && !vm_walk_names(l->arch, l->runtime)->by_size;
    const bool late = op == VM_ENCODE || (l->diffusers && l->arch->family == VM_KL);
    part part[MOST_PARTS];
    const size_t parts = vm_walk_parts(l->arch, l->runtime, op, part), last = l->arch->levels - 1;
    add_level(l, op, part, parts, BEGIN);
    if (!late) add_level(l, op, part, parts, MID);
    for (size_t i = 0; i <= last; i++) add_level(l, op, part, parts, by_use ? last - i : i);
    if (late) add_level(l, op, part, parts, MID);
    add_level(l, op, part, parts, END);
}

/* ---- of tiny autoencoders (tiny.c) ---- */

static void tiny_half(list *l, vm_op op) {
    const vm_arch *a = l->arch;
    const bool decodes = op == VM_DECODE;
    const size_t c = vm_arch_widths(a, op)[0], last = a->levels - 1, latent = a->latent_channels;
    const path name = at((path){""}, "%s.layers", decodes ? "decoder" : "encoder");
    size_t number = decodes ? 2 : 1;
    filters(l, decodes ? latent : a->in_channels, c, 3, at(name, ".0"));
    for (size_t i = 0; i <= last; i++) {
        const size_t level = decodes ? last - i : i;
        if (!decodes && i) bare(l, c, c, 3, at(name, ".%zu", number++));
        for (size_t j = 0; j < (level ? a->layers_per_block : 1); j++) {
            const path block = at(name, ".%zu", number++), pool = at(block, ".pool");
            for (int k = 0; k < 3; k++) filters(l, c, c, 3, at(block, ".conv.%d", 2 * k));
            if (!a->norm_num_groups || level < last) continue;
            bare(l, c, 4 * c, 1, at(pool, ".0"));
            group_norm(l, 4 * c, at(pool, ".1"));
            bare(l, 4 * c, c, 1, at(pool, ".3"));
        }
        if (!decodes || i == last) continue;
        bare(l, c, c, 3, at(name, ".%zu", number + 1));
        number += 2; /* the upsampler, which has none, and this */
    }
    filters(l, c, decodes ? a->out_channels : latent, 3, at(name, ".%zu", number));
}

void vm_parameters_free(vm_parameters *p) {
    if (!p) return;
    vm_mem_free(vm_mem_common, VM_SCRATCH, p->item, vm_mem_capacity(p->count) * sizeof *p->item);
    vm_mem_free(vm_mem_common, VM_SCRATCH, p, sizeof *p);
}

vm_status vm_trace_vae_parameters(const vm_arch *arch, vm_trace_runtime runtime, vm_parameters **out) {
    void *found = NULL;
    *out = NULL;
    vm_status s;
    if ((s = vm_arch_check(arch))) return s;
    if ((s = vm_walk_check_code(arch, runtime))) return s;
    if ((s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, sizeof **out, &found))) return s;
    const uint64_t z = arch->latent_channels;
    list l = {.found = found, .arch = arch, .runtime = runtime, .diffusers = runtime == VM_TORCH_DIFFUSERS};
    void (*const own)(list *l, vm_op op) = arch->family == VM_TINY ? tiny_half : half;
    const bool is_kl = arch->family == VM_KL,
               between = arch->family == VM_WAN; /* these convolutions stand in between */
    const char *const quant[2] = {between && !l.diffusers ? "conv1" : "quant_conv",
                                  between && !l.diffusers ? "conv2" : "post_quant_conv"};
    own(&l, VM_ENCODE);
    if (!between) own(&l, VM_DECODE);
    if (between || (is_kl && arch->use_quant_conv)) cube(&l, 2 * z, 2 * z, 1, 1, at((path){""}, "%s", quant[0]));
    if (between || (is_kl && arch->use_post_quant_conv)) cube(&l, z, z, 1, 1, at((path){""}, "%s", quant[1]));
    if (between) own(&l, VM_DECODE);
    if (is_kl && arch->patch_size[0])
        batch_norm(&l, VM_PRODUCT64(arch->patch_size[0], arch->patch_size[1], z), (path){"bn"});
    if (l.status)
        vm_parameters_free(found);
    else
        *out = found;
    return l.status;
}
