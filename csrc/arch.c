/* The models as tables. Sources, per row:
 *   sd15  stable-diffusion-v1-5/stable-diffusion-v1-5  vae/config.json
 *   sdxl  stabilityai/stable-diffusion-xl-base-1.0     vae/config.json
 *   flux  black-forest-labs/FLUX.1-dev                 vae/config.json; the same numbers stand in
 *         black-forest-labs/flux util.py (ch 128, ch_mult 1 2 4 4, z_channels 16, scale_factor 0.3611,
 *         shift_factor 0.1159)
 *
 * eps is 1e-6 in every GroupNorm of these models (diffusers passes resnet_eps=1e-6; LDM writes eps=1e-6).
 * The encoder's downsampling pads (0, 1, 0, 1) and convolves with stride 2 and no padding (diffusers'
 * downsample_padding=0; LDM's Downsample): it is part of every model here and not a setting. */
#include <string.h>

#include "vm.h"

/* What the three have in common. */
#define VM_SD_FAMILY                                                                                  \
    .in_channels = 3, .out_channels = 3, .levels = 4, .block_out_channels = {128, 256, 512, 512},     \
    .layers_per_block = 2, .norm_num_groups = 32, .norm_eps = 1e-6f, .mid_block_add_attention = true, \
    .scaling_known = true

static const vm_arch sd15 = {VM_SD_FAMILY,
                             .name = "sd15",
                             .latent_channels = 4,
                             .use_quant_conv = true,
                             .use_post_quant_conv = true,
                             .scaling_factor = 0.18215f};
static const vm_arch sdxl = {VM_SD_FAMILY,
                             .name = "sdxl",
                             .latent_channels = 4,
                             .use_quant_conv = true,
                             .use_post_quant_conv = true,
                             .scaling_factor = 0.13025f};
static const vm_arch flux = {VM_SD_FAMILY, .name = "flux", .latent_channels = 16, .scaling_factor = 0.3611f,
                             .shift_factor = 0.1159f};

const vm_arch *const *vm_arch_models(void) {
    static const vm_arch *const all[] = {&sd15, &sdxl, &flux, NULL};
    return all;
}

const vm_arch *vm_arch_find(const char *name) {
    for (const vm_arch *const *a = vm_arch_models(); *a; a++)
        if (!strcmp((*a)->name, name)) return *a;
    vm_fail(VM_EINVAL, "model: want sd15, sdxl or flux, got '%s'", name);
    return NULL;
}

static vm_status in_range(const char *what, size_t value, size_t low, size_t high) {
    if (value < low || value > high)
        return vm_fail(VM_EINVAL, "config: %s: want %zu to %zu, got %zu", what, low, high, value);
    return VM_OK;
}

vm_status vm_arch_check(const vm_arch *a) {
    const struct {
        const char *what;
        size_t value, low, high;
    } ranges[] = {
        {"in_channels", a->in_channels, 1, 64},
        {"out_channels", a->out_channels, 1, 64},
        {"latent_channels", a->latent_channels, 1, 1024},
        {"block_out_channels (how many)", a->levels, 1, VM_MAX_LEVELS},
        {"layers_per_block", a->layers_per_block, 1, VM_MAX_LAYERS},
        {"norm_num_groups", a->norm_num_groups, 1, 65536},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        vm_status s = in_range(ranges[i].what, ranges[i].value, ranges[i].low, ranges[i].high);
        if (s) return s;
    }
    for (size_t i = 0; i < a->levels; i++) {
        vm_status s = in_range("block_out_channels", a->block_out_channels[i], 1, 65536);
        if (s) return s;
        if (a->block_out_channels[i] % a->norm_num_groups)
            return vm_fail(VM_EINVAL,
                           "config: block_out_channels[%zu]: want a multiple of norm_num_groups %zu, got %zu", i,
                           a->norm_num_groups, a->block_out_channels[i]);
    }
    if (!(a->norm_eps >= 0)) return vm_fail(VM_EINVAL, "config: norm_eps: want 0 or more, got %g", (double)a->norm_eps);
    if (a->scaling_known && !(a->scaling_factor > 0))
        return vm_fail(VM_EINVAL, "config: scaling_factor: want more than 0, got %g", (double)a->scaling_factor);
    return VM_OK;
}

size_t vm_arch_factor(const vm_arch *a) { return (size_t)1 << (a->levels - 1); }
