/* The models as tables. Sources, per row:
 *   sd15  stable-diffusion-v1-5/stable-diffusion-v1-5  vae/config.json
 *   sdxl  stabilityai/stable-diffusion-xl-base-1.0     vae/config.json
 *   flux  black-forest-labs/FLUX.1-dev                 vae/config.json; the same numbers stand in
 *         black-forest-labs/flux util.py (ch 128, ch_mult 1 2 4 4, z_channels 16, scale_factor 0.3611,
 *         shift_factor 0.1159)
 *   sd3   stabilityai/stable-diffusion-3-medium-diffusers  vae/config.json, as diffusers' convert_sd3_to_diffusers.py
 *         writes it
 *   zimage  Tongyi-MAI/Z-Image-Turbo  vae/config.json: FLUX.1's VAE
 *   cogview4  THUDM/CogView4-6B  vae/config.json, as diffusers' convert_cogview4_to_diffusers.py writes it
 *   playground-v2.5  playgroundai/playground-v2.5-1024px-aesthetic  vae/config.json; the statistics stand in ComfyUI's
 *         latent_formats.py (SDXL_Playground_2_5), the factor in diffusers' single_file_utils.py too
 *   flux2  black-forest-labs/FLUX.2-dev  vae/config.json: the defaults of diffusers' AutoencoderKLFlux2
 *   qwen-image  Qwen/Qwen-Image  vae/config.json: the defaults of diffusers' AutoencoderKLQwenImage, which are those of
 *         AutoencoderKLWan too (Wan-AI/Wan2.1-T2V-14B-Diffusers); the same tensors, finetuned
 *   flux2-small  black-forest-labs/FLUX.2-small-decoder: flux2 with another decoder (huggingface/diffusers#13428)
 *
 * eps is 1e-6 in every GroupNorm of these models (diffusers passes resnet_eps=1e-6; LDM writes eps=1e-6).
 * The encoder's downsampling pads (0, 1, 0, 1) and convolves with stride 2 and no padding (diffusers'
 * downsample_padding=0; LDM's Downsample): it is part of every model here and not a setting. */
#include "vm.h"

/* What most have in common. */
#define VM_SD_BLOCKS                                                                              \
    .in_channels = 3, .out_channels = 3, .levels = 4, .block_out_channels = {128, 256, 512, 512}, \
    .layers_per_block = 2, .norm_num_groups = 32, .norm_eps = 1e-6f, .mid_block_add_attention = true
#define VM_SD_FAMILY VM_SD_BLOCKS, .scaling_known = true
#define VM_FLUX2                                                                                                    \
    VM_SD_BLOCKS, .latent_channels = 32, .use_quant_conv = true, .use_post_quant_conv = true, .patch_size = {2, 2}, \
        .batch_norm_eps = 1e-4f

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
static const vm_arch sd3 = {VM_SD_FAMILY, .name = "sd3", .latent_channels = 16, .scaling_factor = 1.5305f,
                            .shift_factor = 0.0609f};
static const vm_arch zimage = {VM_SD_FAMILY, .name = "zimage", .latent_channels = 16, .scaling_factor = 0.3611f,
                               .shift_factor = 0.1159f};
static const vm_arch cogview4 = {.name = "cogview4",
                                 .in_channels = 3,
                                 .out_channels = 3,
                                 .latent_channels = 16,
                                 .levels = 4,
                                 .block_out_channels = {128, 512, 1024, 1024},
                                 .layers_per_block = 3,
                                 .norm_num_groups = 32,
                                 .norm_eps = 1e-6f,
                                 .scaling_known = true,
                                 .scaling_factor = 1};
static const vm_arch playground = {VM_SD_FAMILY,
                                   .name = "playground-v2.5",
                                   .latent_channels = 4,
                                   .use_quant_conv = true,
                                   .use_post_quant_conv = true,
                                   .scaling_factor = 0.5f,
                                   .statistics = 4,
                                   .latents_mean = {-1.6574f, 1.886f, -1.383f, 2.5155f},
                                   .latents_std = {8.4927f, 5.9022f, 6.5498f, 5.2299f}};
static const vm_arch flux2 = {VM_FLUX2, .name = "flux2"};
static const vm_arch flux2_small = {VM_FLUX2, .name = "flux2-small", .decoder_block_out_channels = {96, 192, 384, 384}};

static const vm_arch qwen_image = {
    .name = "qwen-image",
    .family = VM_WAN,
    .in_channels = 3,
    .out_channels = 3,
    .latent_channels = 16,
    .levels = 4,
    .block_out_channels = {96, 192, 384, 384},
    .layers_per_block = 2,
    .norm_eps = 1e-12f,
    .use_quant_conv = true,
    .use_post_quant_conv = true,
    .mid_block_add_attention = true,
    .scaling_known = true,
    .scaling_factor = 1,
    .statistics = 16,
    .latents_mean = {-0.7571f, -0.7089f, -0.9113f, 0.1075f, -0.1745f, 0.9653f, -0.1517f, 1.5508f, 0.4134f, -0.0715f,
                     0.5517f, -0.3632f, -0.1922f, -0.9497f, 0.2503f, -0.2921f},
    .latents_std = {2.8184f, 1.4541f, 2.3275f, 2.6558f, 1.2196f, 1.7708f, 2.6052f, 2.0743f, 3.2687f, 2.1526f, 2.8652f,
                    1.5579f, 1.6382f, 1.1253f, 2.8251f, 1.9160f}};

const vm_arch *const *vm_arch_models(void) {
    static const vm_arch *const all[] = {&sd15,       &sdxl,  &flux,        &sd3,        &zimage, &cogview4,
                                         &playground, &flux2, &flux2_small, &qwen_image, NULL};
    return all;
}

static vm_status in_range(const char *what, size_t value, size_t low, size_t high) {
    if (value < low || value > high)
        return vm_fail(VM_EINVAL, "config: %s: want %zu to %zu, got %zu", what, low, high, value);
    return VM_OK;
}

static vm_status check_widths(const vm_arch *a, const char *what, const size_t *width) {
    for (size_t i = 0; i < a->levels; i++) {
        vm_status s = in_range(what, width[i], 1, 65536);
        if (s) return s;
        if (a->family == VM_WAN && i && width[i] % 2)
            return vm_fail(VM_EINVAL, "config: %s[%zu]: want an even number, which an upsampler halves, got %zu", what,
                           i, width[i]);
        if (a->family == VM_KL && width[i] % a->norm_num_groups)
            return vm_fail(VM_EINVAL, "config: %s[%zu]: want a multiple of norm_num_groups %zu, got %zu", what, i,
                           a->norm_num_groups, width[i]);
    }
    return VM_OK;
}

/* What a pipeline does with the latents. */
static vm_status check_latents(const vm_arch *a) {
    if (a->scaling_known && !(a->scaling_factor > 0))
        return vm_fail(VM_EINVAL, "config: scaling_factor: want more than 0, got %g", (double)a->scaling_factor);
    if (a->statistics && a->statistics != a->latent_channels)
        return vm_fail(VM_EINVAL, "config: latents_mean, latents_std: want %zu numbers each, got %zu",
                       a->latent_channels, a->statistics);
    for (size_t i = 0; i < a->statistics; i++)
        if (!(a->latents_std[i] > 0))
            return vm_fail(VM_EINVAL, "config: latents_std[%zu]: want more than 0, got %g", i,
                           (double)a->latents_std[i]);
    if (!a->patch_size[0] && !a->patch_size[1]) return VM_OK;
    for (int i = 0; i < 2; i++) {
        vm_status s = in_range("patch_size", a->patch_size[i], 1, 64);
        if (s) return s;
    }
    if (!(a->batch_norm_eps >= 0))
        return vm_fail(VM_EINVAL, "config: batch_norm_eps: want 0 or more, got %g", (double)a->batch_norm_eps);
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
        {"norm_num_groups", a->norm_num_groups, a->family == VM_KL, a->family == VM_KL ? 65536 : 0},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        vm_status s = in_range(ranges[i].what, ranges[i].value, ranges[i].low, ranges[i].high);
        if (s) return s;
    }
    vm_status s = check_widths(a, "block_out_channels", a->block_out_channels);
    if (!s && a->decoder_block_out_channels[0])
        s = check_widths(a, "decoder_block_out_channels", a->decoder_block_out_channels);
    if (s) return s;
    if (!(a->norm_eps >= 0)) return vm_fail(VM_EINVAL, "config: norm_eps: want 0 or more, got %g", (double)a->norm_eps);
    return check_latents(a);
}

const size_t *vm_arch_widths(const vm_arch *a, vm_op op) {
    return op == VM_DECODE && a->decoder_block_out_channels[0] ? a->decoder_block_out_channels : a->block_out_channels;
}

size_t vm_arch_factor(const vm_arch *a) { return (size_t)1 << (a->levels - 1); }
