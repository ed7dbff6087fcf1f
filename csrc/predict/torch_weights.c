/* The parameters of the VAEs in the order in which Module.to moves them: submodules in the order in which
 * __init__ assigns them, then a module's own parameters, weight before bias. The order decides which small
 * leftovers of segments remain. */
#include "torch_walk.h"

typedef struct list {
    vm_parameters *found;
    const vm_arch *arch;
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

static void vector(list *l, path name, const char *own, size_t c) {
    add(l, name, own, (vm_parameter){.dims = 1, .shape = {c}});
}

/* Without a bias. */
static void bare(list *l, size_t in, size_t out, size_t side, path name) {
    add(l, name, "weight", (vm_parameter){.dims = 4, .shape = {out, in, side, side}});
}

static void filters(list *l, size_t in, size_t out, size_t side, path name) {
    bare(l, in, out, side, name);
    vector(l, name, "bias", out);
}

static void linear(list *l, size_t c, path name) {
    add(l, name, "weight", (vm_parameter){.dims = 2, .shape = {c, c}});
    vector(l, name, "bias", c);
}

static void group_norm(list *l, size_t c, path name) {
    vector(l, name, "weight", c);
    vector(l, name, "bias", c);
}

/* Without parameters: its running mean and variance, and how many batches it saw. */
static void batch_norm(list *l, size_t c, path name) {
    vector(l, name, "running_mean", c);
    vector(l, name, "running_var", c);
    add(l, name, "num_batches_tracked", (vm_parameter){.integer = true});
}

static void resnet(list *l, size_t in, size_t out, path name) {
    group_norm(l, in, at(name, ".norm1"));
    filters(l, in, out, 3, at(name, ".conv1"));
    group_norm(l, out, at(name, ".norm2"));
    filters(l, out, out, 3, at(name, ".conv2"));
    if (in != out) filters(l, in, out, 1, at(name, l->diffusers ? ".conv_shortcut" : ".nin_shortcut"));
}

static void mid(list *l, size_t c, path half) {
    static const char *const product[2][4] = {{".q", ".k", ".v", ".proj_out"},
                                              {".to_q", ".to_k", ".to_v", ".to_out.0"}};
    const path name = at(half, l->diffusers ? ".mid_block.attentions.0" : ".mid.attn_1");
    if (!l->diffusers) resnet(l, c, c, at(half, ".mid.block_1"));
    if (l->arch->mid_block_add_attention) {
        group_norm(l, c, at(name, l->diffusers ? ".group_norm" : ".norm"));
        for (int i = 0; i < 4; i++) {
            if (l->diffusers)
                linear(l, c, at(name, "%s", product[1][i]));
            else
                filters(l, c, c, 1, at(name, "%s", product[0][i]));
        }
    }
    if (l->diffusers) resnet(l, c, c, at(half, ".mid_block.resnets.0"));
    resnet(l, c, c, at(half, l->diffusers ? ".mid_block.resnets.1" : ".mid.block_2"));
}

/* way: "down" or "up". */
static void level(list *l, size_t in, size_t out, size_t resnets, bool resamples, const char *way, path half,
                  size_t i) {
    const path name = at(half, l->diffusers ? ".%s_blocks.%zu" : ".%s.%zu", way, i);
    for (size_t j = 0; j < resnets; j++)
        resnet(l, j ? out : in, out, at(name, l->diffusers ? ".resnets.%zu" : ".block.%zu", j));
    if (resamples) filters(l, out, out, 3, at(name, l->diffusers ? ".%ssamplers.0.conv" : ".%ssample.conv", way));
}

static void finish(list *l, size_t c, size_t out, path half) {
    group_norm(l, c, at(half, l->diffusers ? ".conv_norm_out" : ".norm_out"));
    filters(l, c, out, 3, at(half, ".conv_out"));
}

static void encoder(list *l) {
    const vm_arch *a = l->arch;
    const size_t *c = vm_arch_widths(a, VM_ENCODE), last = a->levels - 1;
    const path half = {"encoder"};
    filters(l, a->in_channels, c[0], 3, at(half, ".conv_in"));
    for (size_t i = 0; i < a->levels; i++)
        level(l, c[i ? i - 1 : 0], c[i], a->layers_per_block, i < last, "down", half, i);
    mid(l, c[last], half);
    finish(l, c[last], 2 * a->latent_channels, half);
}

static void decoder(list *l) {
    const vm_arch *a = l->arch;
    const size_t *c = vm_arch_widths(a, VM_DECODE), last = a->levels - 1;
    const path half = {"decoder"};
    filters(l, a->latent_channels, c[last], 3, at(half, ".conv_in"));
    if (!l->diffusers) mid(l, c[last], half);
    for (size_t i = 0; i < a->levels; i++) { /* diffusers numbers the levels by order of use, the others by size */
        const size_t here = l->diffusers ? last - i : i;
        level(l, c[here < last ? here + 1 : last], c[here], a->layers_per_block + 1, here > 0, "up", half, i);
    }
    if (l->diffusers) mid(l, c[last], half);
    finish(l, c[0], a->out_channels, half);
}

/* ---- of tiny autoencoders (torch_tiny.c) ---- */

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

/* ---- of videos' VAEs (torch_frames.c) ---- */

static bool is_wan(const list *l) { return l->arch->family == VM_WAN; }

/* A filter of `frames` slices, where the model has any. */
static void cube(list *l, size_t in, size_t out, size_t frames, size_t side, path name) {
    if (!l->arch->slices) {
        filters(l, in, out, side, name);
        return;
    }
    add(l, name, "weight", (vm_parameter){.dims = 5, .shape = {out, in, frames, side, side}});
    vector(l, name, "bias", out);
}

static void frame_norm(list *l, size_t c, int dims, path name) {
    if (is_wan(l))
        add(l, name, "gamma", (vm_parameter){.dims = dims, .shape = {c, 1, 1, 1}});
    else
        group_norm(l, c, name);
}

static void frame_resnet(list *l, size_t in, size_t out, path name) {
    const char *const names[2][5] = {{".residual.0", ".residual.2", ".residual.3", ".residual.6", ".shortcut"},
                                     {".norm1", ".conv1", ".norm2", ".conv2", ".conv_shortcut"}};
    const char *const *own = names[l->diffusers];
    frame_norm(l, in, 4, at(name, "%s", own[0]));
    cube(l, in, out, 3, 3, at(name, "%s", own[1]));
    frame_norm(l, out, 4, at(name, "%s", own[2]));
    cube(l, out, out, 3, 3, at(name, "%s", own[3]));
    if (in != out) cube(l, in, out, 1, 1, at(name, "%s", own[4]));
}

static void frame_attention(list *l, size_t c, path name) {
    if (!l->arch->mid_block_add_attention) return;
    frame_norm(l, c, 3, at(name, ".norm"));
    if (is_wan(l)) filters(l, c, 3 * c, 1, at(name, ".to_qkv"));
    for (int i = 0; !is_wan(l) && i < 3; i++) filters(l, c, c, 1, at(name, ".to_%c", "qkv"[i]));
    filters(l, c, c, 1, at(name, ".proj"));
}

static void frame_mid(list *l, size_t c, path half) {
    const path attention = at(half, l->diffusers ? ".mid_block.attentions.0" : ".middle.1");
    if (!l->diffusers) frame_resnet(l, c, c, at(half, ".middle.0"));
    if (is_wan(l)) frame_attention(l, c, attention);
    if (l->diffusers) frame_resnet(l, c, c, at(half, ".mid_block.resnets.0"));
    frame_resnet(l, c, c, at(half, l->diffusers ? ".mid_block.resnets.1" : ".middle.2"));
    if (!is_wan(l)) frame_attention(l, c, attention);
}

/* Behind level number `level` of `op`; of c channels, to `next`. */
static void frame_resampler(list *l, vm_op op, size_t level, size_t c, size_t next, path name) {
    const vm_arch *a = l->arch;
    const bool decodes = op == VM_DECODE;
    if (!is_wan(l)) {
        filters(l, c, decodes ? 4 * next : next / 4, 3, at(name, ".conv"));
        return;
    }
    filters(l, c, next, 3, at(name, ".resample.1"));
    if (vm_walk_is_temporal(a, level - decodes)) cube(l, c, decodes ? 2 * c : c, 3, 1, at(name, ".time_conv"));
}

static void frame_half(list *l, vm_op op) {
    const vm_arch *a = l->arch;
    const bool decodes = op == VM_DECODE, flat = !l->diffusers || !is_wan(l) || (!decodes && !a->residual);
    const size_t *c = vm_arch_widths(a, op), last = a->levels - 1, deepest = c[last], patch = VM_MAX(a->image_patch, 1);
    const size_t pixels = (decodes ? a->out_channels : a->in_channels) * patch * patch, latent = a->latent_channels;
    const path half = at((path){""}, "%s", decodes ? "decoder" : "encoder");
    const path blocks = at(half, l->diffusers ? decodes ? ".up_blocks" : ".down_blocks"
                                 : decodes    ? ".upsamples"
                                              : ".downsamples");
    const char *resampler = !a->residual ? ".upsamplers.0" : decodes ? ".upsampler" : ".downsampler";
    size_t in = decodes ? deepest : c[0], block = 0;
    cube(l, decodes ? latent : pixels, in, 3, 3, at(half, l->diffusers ? ".conv_in" : ".conv1"));
    if (decodes) frame_mid(l, deepest, half);
    for (size_t i = 0; i <= last; i++) {
        const size_t level = decodes ? last - i : i, width = c[level];
        const path top = at(blocks, ".%zu", i);
        for (size_t j = 0; j < a->layers_per_block + decodes; j++, in = width)
            frame_resnet(l, in, width, flat ? at(blocks, ".%zu", block++) : at(top, ".resnets.%zu", j));
        if (i == last) break;
        if (!is_wan(l)) in = c[decodes ? level - 1 : level + 1];
        if (is_wan(l) && decodes && !a->residual) in = width / 2;
        frame_resampler(l, op, level, width, in, flat ? at(blocks, ".%zu", block++) : at(top, "%s", resampler));
    }
    if (!decodes) frame_mid(l, deepest, half);
    const size_t ends = c[decodes ? 0 : last];
    frame_norm(l, ends, 4, at(half, l->diffusers ? ".norm_out" : ".head.0"));
    cube(l, ends, decodes ? pixels : 2 * latent, 3, 3, at(half, l->diffusers ? ".conv_out" : ".head.2"));
}

static vm_status finished(list *l, void *found, vm_parameters **out) {
    if (l->status)
        vm_parameters_free(found);
    else
        *out = found;
    return l->status;
}

void vm_parameters_free(vm_parameters *p) {
    if (!p) return;
    vm_mem_free(vm_mem_common, VM_SCRATCH, p->item, vm_mem_capacity(p->count) * sizeof *p->item);
    vm_mem_free(vm_mem_common, VM_SCRATCH, p, sizeof *p);
}

vm_status vm_trace_vae_parameters(const vm_arch *arch, vm_trace_runtime runtime, vm_parameters **out) {
    void *found = NULL;
    *out = NULL;
    vm_status s = vm_arch_check(arch);
    if (!s) s = vm_walk_check_code(arch, runtime);
    if (!s) s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, sizeof **out, &found);
    if (s) return s;
    const size_t z = arch->latent_channels;
    list l = {.found = found, .arch = arch, .diffusers = runtime == VM_TORCH_DIFFUSERS};
    if (arch->family != VM_KL) {
        void (*const half)(list *l, vm_op op) = arch->family == VM_TINY ? tiny_half : frame_half;
        half(&l, VM_ENCODE);
        if (arch->family == VM_WAN) {
            cube(&l, 2 * z, 2 * z, 1, 1, at((path){""}, l.diffusers ? "quant_conv" : "conv1"));
            cube(&l, z, z, 1, 1, at((path){""}, l.diffusers ? "post_quant_conv" : "conv2"));
        }
        half(&l, VM_DECODE);
        return finished(&l, found, out);
    }
    encoder(&l);
    decoder(&l);
    if (arch->use_quant_conv) filters(&l, 2 * z, 2 * z, 1, (path){"quant_conv"});
    if (arch->use_post_quant_conv) filters(&l, z, z, 1, (path){"post_quant_conv"});
    if (arch->patch_size[0]) batch_norm(&l, VM_PRODUCT(arch->patch_size[0], arch->patch_size[1], z), (path){"bn"});
    return finished(&l, found, out);
}

vm_status vm_trace_vae_weights(const vm_arch *arch, vm_trace_runtime runtime, vm_dtype dtype, vm_trace **out) {
    vm_parameters *p;
    *out = NULL;
    vm_status s = vm_trace_vae_parameters(arch, runtime, &p);
    if (!s) s = vm_trace_new(out);
    for (size_t i = 0; !s && i < p->count; i++) {
        const vm_parameter *one = &p->item[i];
        size_t bytes = one->integer ? sizeof(int64_t) : vm_dtype_bytes(dtype);
        for (int d = 0; d < one->dims; d++) bytes = VM_PRODUCT(bytes, one->shape[d]);
        uint32_t id;
        s = vm_trace_take(*out, bytes, one->dims == 4 ? "filter" : "weights", &id);
    }
    vm_parameters_free(p);
    if (s) {
        vm_trace_free(*out);
        *out = NULL;
    }
    return s;
}
