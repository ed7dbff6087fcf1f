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
 *   taesd, taef1  madebyollin/taesd, taesdxl (4 latent channels), taesd3, taef1 (16)  config.json: the defaults of
 *         diffusers' AutoencoderTiny
 *   taef2  madebyollin/taesd  taesd.py, use_midblock_gn: GroupNorm of 4 groups, with PyTorch's own eps
 *   flux2-small  black-forest-labs/FLUX.2-small-decoder: flux2 with another decoder (huggingface/diffusers#13428)
 *   wan2.2  Wan-AI/Wan2.2-TI2V-5B  vae/config.json, as diffusers' convert_wan_to_diffusers.py writes it; the statistics
 *         stand in wan/modules/vae2_2.py of Wan-Video/Wan2.2
 *   qwen-image-2.1  the defaults of diffusers' AutoencoderKLQwenImage21 (0.42)
 *   ltx2, ltx2.3  Lightricks/LTX-2 and LTX-2.3  vae/config.json, as diffusers' convert_ltx2_to_diffusers.py writes
 *         them; the statistics come with the weights
 *   hunyuanimage-2.1  tencent/HunyuanImage-2.1  vae/config.json, as diffusers' convert_hunyuan_image_to_diffusers.py
 *         writes it
 *
 * eps is 1e-6 in every GroupNorm of these models (diffusers passes resnet_eps=1e-6; LDM writes eps=1e-6).
 * The encoder's downsampling pads (0, 1, 0, 1) and convolves with stride 2 and no padding (diffusers'
 * downsample_padding=0; LDM's Downsample): it is part of every model here and not a setting. Tiny ones pad
 * all sides. */
#include "vm.h"

/* Fields that most models share. */
#define VM_SD_BLOCKS                                                                              \
    .in_channels = 3, .out_channels = 3, .levels = 4, .block_out_channels = {128, 256, 512, 512}, \
    .layers_per_block = 2, .norm_num_groups = 32, .norm_eps = 1e-6f, .mid_block_add_attention = true
#define VM_SD_FAMILY VM_SD_BLOCKS, .scaling_known = true
#define VM_SD VM_SD_FAMILY, .latent_channels = 4, .use_quant_conv = true, .use_post_quant_conv = true
#define VM_FLUX2                                                                                                    \
    VM_SD_BLOCKS, .latent_channels = 32, .use_quant_conv = true, .use_post_quant_conv = true, .patch_size = {2, 2}, \
        .batch_norm_eps = 1e-4f

static const vm_arch sd15 = {VM_SD, .name = "sd15", .scaling_factor = 0.18215f};
static const vm_arch sdxl = {VM_SD, .name = "sdxl", .scaling_factor = 0.13025f};
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
static const vm_arch playground = {VM_SD,
                                   .name = "playground-v2.5",
                                   .scaling_factor = 0.5f,
                                   .statistics = 4,
                                   .latents_mean = {-1.6574f, 1.886f, -1.383f, 2.5155f},
                                   .latents_std = {8.4927f, 5.9022f, 6.5498f, 5.2299f}};
static const vm_arch flux2 = {VM_FLUX2, .name = "flux2"};
static const vm_arch flux2_small = {VM_FLUX2, .name = "flux2-small", .decoder_block_out_channels = {96, 192, 384, 384}};

#define VM_OF_FRAMES                                                                                                  \
    .family = VM_WAN, .layers_per_block = 2, .norm_eps = 1e-12f, .use_quant_conv = true, .use_post_quant_conv = true, \
    .mid_block_add_attention = true, .scaling_known = true, .scaling_factor = 1
static const vm_arch qwen_image = {
    .name = "qwen-image",
    VM_OF_FRAMES,
    .slices = true,
    .in_channels = 3,
    .out_channels = 3,
    .latent_channels = 16,
    .levels = 4,
    .block_out_channels = {96, 192, 384, 384},
    .statistics = 16,
    .latents_mean = {-0.7571f, -0.7089f, -0.9113f, 0.1075f, -0.1745f, 0.9653f, -0.1517f, 1.5508f, 0.4134f, -0.0715f,
                     0.5517f, -0.3632f, -0.1922f, -0.9497f, 0.2503f, -0.2921f},
    .latents_std = {2.8184f, 1.4541f, 2.3275f, 2.6558f, 1.2196f, 1.7708f, 2.6052f, 2.0743f, 3.2687f, 2.1526f, 2.8652f,
                    1.5579f, 1.6382f, 1.1253f, 2.8251f, 1.9160f}};

static const vm_arch wan22 = {
    .name = "wan2.2",
    VM_OF_FRAMES,
    .slices = true,
    .residual = true,
    .temporal = {false, true, true},
    .image_patch = 2,
    .in_channels = 3,
    .out_channels = 3,
    .latent_channels = 48,
    .levels = 4,
    .block_out_channels = {160, 320, 640, 640},
    .decoder_block_out_channels = {256, 512, 1024, 1024},
    .statistics = 48,
    .latents_mean = {-0.2289f, -0.0052f, -0.1323f, -0.2339f, -0.2799f, 0.0174f,  0.1838f,  0.1557f,  -0.1382f, 0.0542f,
                     0.2813f,  0.0891f,  0.157f,   -0.0098f, 0.0375f,  -0.1825f, -0.2246f, -0.1207f, -0.0698f, 0.5109f,
                     0.2665f,  -0.2108f, -0.2158f, 0.2502f,  -0.2055f, -0.0322f, 0.1109f,  0.1567f,  -0.0729f, 0.0899f,
                     -0.2799f, -0.123f,  -0.0313f, -0.1649f, 0.0117f,  0.0723f,  -0.2839f, -0.2083f, -0.052f,  0.3748f,
                     0.0152f,  0.1957f,  0.1433f,  -0.2944f, 0.3573f,  -0.0548f, -0.1681f, -0.0667f},
    .latents_std = {0.4765f, 1.0364f, 0.4514f, 1.1677f, 0.5313f, 0.499f,  0.4818f, 0.5013f, 0.8158f, 1.0344f,
                    0.5894f, 1.0901f, 0.6885f, 0.6165f, 0.8454f, 0.4978f, 0.5759f, 0.3523f, 0.7135f, 0.6804f,
                    0.5833f, 1.4146f, 0.8986f, 0.5659f, 0.7069f, 0.5338f, 0.4889f, 0.4917f, 0.4069f, 0.4999f,
                    0.6866f, 0.4093f, 0.5709f, 0.6065f, 0.6415f, 0.4944f, 0.5726f, 1.2042f, 0.5458f, 1.6887f,
                    0.3971f, 1.06f,   0.3943f, 0.5537f, 0.5444f, 0.4089f, 0.7468f, 0.7744f}};

static const vm_arch qwen_image_21 = {
    .name = "qwen-image-2.1",
    VM_OF_FRAMES,
    .residual = true,
    .temporal = {false, true, true, true},
    .in_channels = 4,
    .out_channels = 4,
    .latent_channels = 64,
    .levels = 5,
    .block_out_channels = {96, 192, 384, 768, 768},
    .decoder_block_out_channels = {144, 288, 576, 1152, 1152},
    .statistics = 64,
    .latents_mean = {0.5126f,  0.7721f,  -0.0631f, 1.3506f,  -0.7855f, -2.1025f, -0.3458f, 1.3722f,  1.8873f,  -1.7177f,
                     -0.651f,  0.2732f,  0.7562f,  -0.6163f, -1.0277f, 3.8363f,  2.021f,   0.0472f,  0.932f,   2.0087f,
                     2.4954f,  -0.1391f, -1.4249f, 1.8464f,  -0.5236f, 1.2826f,  3.7046f,  -1.3035f, 2.7286f,  -1.4518f,
                     -1.9036f, -1.9955f, -0.0342f, -1.0265f, -0.7636f, 3.0555f,  0.0746f,  -3.0751f, -0.1076f, 1.7376f,
                     -1.0914f, -1.9435f, -0.2784f, -1.368f,  0.4809f,  -0.4433f, 0.3764f,  0.5729f,  -2.0595f, 1.096f,
                     -1.326f,  -2.0211f, -5.0179f, 0.5275f,  4.0162f,  1.8505f,  0.3026f,  1.9373f,  1.4937f,  0.2632f,
                     0.5547f,  -1.7121f, -0.1562f, 0.0304f},
    .latents_std = {3.2001f, 3.2936f, 3.4321f, 3.0091f, 3.1061f, 4.0379f, 4.0705f, 3.791f,  3.0785f, 3.65f,   3.9308f,
                    3.0904f, 2.8778f, 3.7675f, 3.732f,  5.0756f, 3.2864f, 4.0397f, 3.1317f, 4.0443f, 2.9249f, 3.9454f,
                    3.0988f, 4.2489f, 3.4896f, 3.8513f, 3.9323f, 3.4719f, 3.7498f, 4.283f,  3.5694f, 4.2467f, 3.9037f,
                    3.2947f, 5.077f,  3.5075f, 3.27f,   3.4767f, 2.8063f, 5.1125f, 3.5327f, 4.7833f, 3.1286f, 4.1819f,
                    3.8527f, 3.8312f, 3.5605f, 4.3875f, 3.9624f, 4.0168f, 3.5643f, 4.055f,  5.5614f, 4.2963f, 4.408f,
                    3.4959f, 3.8747f, 3.7608f, 3.5735f, 3.149f,  3.7662f, 3.6746f, 3.4563f, 3.8161f}};

static const vm_arch hunyuan_image = {.name = "hunyuanimage-2.1",
                                      .family = VM_HUNYUAN_IMAGE,
                                      .in_channels = 3,
                                      .out_channels = 3,
                                      .latent_channels = 64,
                                      .levels = 6,
                                      .block_out_channels = {128, 256, 512, 512, 1024, 1024},
                                      .layers_per_block = 2,
                                      .norm_num_groups = 32,
                                      .norm_eps = 1e-6f,
                                      .mid_block_add_attention = true,
                                      .scaling_known = true,
                                      .scaling_factor = 0.75289f};

#define VM_LTX_BLOCKS                                                                                           \
    .family = VM_LTX, .videos = true, .in_channels = 3, .out_channels = 3, .latent_channels = 128, .levels = 4, \
    .layers_per_block = 4, .norm_eps = 1e-8f, .scaling_known = true, .scaling_factor = 1
#define VM_DOWN {VM_SPACE, VM_TIME, VM_SPACE | VM_TIME, VM_SPACE | VM_TIME}
static const vm_arch ltx2 = {.name = "ltx2",
                             VM_LTX_BLOCKS,
                             .block_out_channels = {256, 512, 1024, 2048},
                             .decoder_block_out_channels = {256, 512, 1024},
                             .half = {{.layers = {4, 6, 6, 2, 2}, .resamplers = VM_DOWN, .causal = true},
                                      {.layers = {5, 5, 5, 5},
                                       .resamplers = {VM_SPACE | VM_TIME, VM_SPACE | VM_TIME, VM_SPACE | VM_TIME},
                                       .factor = {2, 2, 2},
                                       .added = {true, true, true},
                                       .mirrored = true}}};
static const vm_arch ltx23 = {.name = "ltx2.3",
                              VM_LTX_BLOCKS,
                              .block_out_channels = {256, 512, 1024, 1024},
                              .decoder_block_out_channels = {256, 512, 512, 1024},
                              .half = {{.layers = {4, 6, 4, 2, 2}, .resamplers = VM_DOWN, .causal = true},
                                       {.layers = {4, 6, 4, 2, 2},
                                        .resamplers = {VM_SPACE | VM_TIME, VM_SPACE | VM_TIME, VM_TIME, VM_SPACE},
                                        .factor = {2, 2, 1, 2}}}};

#define VM_TAE                                                                                                   \
    .family = VM_TINY, .in_channels = 3, .out_channels = 3, .levels = 4, .block_out_channels = {64, 64, 64, 64}, \
    .layers_per_block = 3, .norm_eps = 1e-5f, .scaling_known = true, .scaling_factor = 1
static const vm_arch taesd = {VM_TAE, .name = "taesd", .latent_channels = 4};
static const vm_arch taef1 = {VM_TAE, .name = "taef1", .latent_channels = 16};
static const vm_arch taef2 = {VM_TAE, .name = "taef2", .latent_channels = 32, .norm_num_groups = 4};

const vm_arch *const *vm_arch_models(void) {
    static const vm_arch *const all[] = {&sd15,     &sdxl,          &flux,          &sd3,         &zimage,
                                         &cogview4, &playground,    &flux2,         &flux2_small, &qwen_image,
                                         &wan22,    &qwen_image_21, &hunyuan_image, &ltx2,        &ltx23,
                                         &taesd,    &taef1,         &taef2,         NULL};
    return all;
}

const size_t *vm_arch_widths(const vm_arch *a, vm_op op) {
    return op == VM_DECODE && a->decoder_block_out_channels[0] ? a->decoder_block_out_channels : a->block_out_channels;
}

size_t vm_arch_levels(const vm_arch *a, vm_op op) {
    size_t levels = a->levels;
    while (a->family == VM_LTX && levels && !vm_arch_widths(a, op)[levels - 1]) levels--;
    return levels;
}

/* Returns: how many resamplers of a half of VM_LTX do that. */
static size_t resamplers(const vm_arch *a, vm_op op, unsigned what) {
    size_t count = 0;
    for (size_t i = 0; i < vm_arch_levels(a, op); i++) count += (a->half[op].resamplers[i] & what) != 0;
    return count;
}

static vm_status in_range(const char *what, size_t value, size_t low, size_t high) {
    if (value < low || value > high)
        return vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "%s", "%zu to %zu", "%zu"), what, low, high, value);
    return VM_OK;
}

static vm_status check_widths(const vm_arch *a, vm_op op) {
    const size_t *width = vm_arch_widths(a, op);
    const char *what = op == VM_DECODE ? "decoder_block_out_channels" : "block_out_channels";
    for (size_t i = 0; i < vm_arch_levels(a, op); i++) {
        vm_status s = in_range(what, width[i], 1, 65536);
        if (s) return s;
        if (a->family == VM_TINY && width[i] != width[0])
            return vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "%s[%zu]", "%zu, the width of the whole half", "%zu"),
                           what, i, width[0], width[i]);
        if (a->family == VM_TINY && a->norm_num_groups && 4 * width[i] % a->norm_num_groups)
            return vm_fail(VM_EINVAL,
                           VM_EXPECTED_IN("config", "%s[%zu]", "4 times it a multiple of norm_num_groups %zu", "%zu"),
                           what, i, a->norm_num_groups, width[i]);
        if (a->family == VM_WAN && !a->residual && i && width[i] % 2)
            return vm_fail(VM_EINVAL,
                           VM_EXPECTED_IN("config", "%s[%zu]", "an even number, which an upsampler halves", "%zu"),
                           what, i, width[i]);
        if ((a->family == VM_KL || a->family == VM_HUNYUAN_IMAGE) && width[i] % a->norm_num_groups)
            return vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "%s[%zu]", "a multiple of norm_num_groups %zu", "%zu"),
                           what, i, a->norm_num_groups, width[i]);
    }
    return VM_OK;
}

/* Checks the pipeline's settings for latents. */
static vm_status check_latents(const vm_arch *a) {
    if (a->scaling_known && !(a->scaling_factor > 0))
        return vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "scaling_factor", "more than 0", "%g"),
                       (double)a->scaling_factor);
    if (a->statistics && a->statistics != a->latent_channels)
        return vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "latents_mean, latents_std", "%zu numbers each", "%zu"),
                       a->latent_channels, a->statistics);
    for (size_t i = 0; i < a->statistics; i++)
        if (!(a->latents_std[i] > 0))
            return vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "latents_std[%zu]", "more than 0", "%g"), i,
                           (double)a->latents_std[i]);
    if (!a->patch_size[0] && !a->patch_size[1]) return VM_OK;
    for (int i = 0; i < 2; i++) {
        vm_status s = in_range("patch_size", a->patch_size[i], 1, 64);
        if (s) return s;
    }
    if (!(a->batch_norm_eps >= 0))
        return vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "batch_norm_eps", "0 or more", "%g"),
                       (double)a->batch_norm_eps);
    return VM_OK;
}

/* Returns: how many numbers of the larger tensor are one of the smaller in a resampler of VM_LTX. */
static size_t parts_of(unsigned what) { return (what & VM_SPACE ? 4u : 1u) * (what & VM_TIME ? 2u : 1u); }

/* Checks the blocks of a half of VM_LTX, in the order in which they run. */
static vm_status check_half(const vm_arch *a, vm_op op) {
    const struct vm_half *half = &a->half[op];
    const size_t levels = vm_arch_levels(a, op), *width = vm_arch_widths(a, op);
    const char *widths = op == VM_ENCODE ? "block_out_channels" : "decoder_block_out_channels";
    const char *layers = op == VM_ENCODE ? "layers_per_block" : "decoder_layers_per_block";
    vm_status s = in_range(layers, half->layers[levels], 1, VM_MAX_LAYERS);
    size_t c = op == VM_ENCODE ? a->latent_channels : width[levels - 1];
    for (size_t i = 0; i < levels && !s; i++) {
        const size_t at = op == VM_ENCODE ? i : levels - 1 - i, parts = parts_of(half->resamplers[i]);
        if ((s = in_range(layers, half->layers[at], 1, VM_MAX_LAYERS))) return s;
        if (op == VM_DECODE && (s = in_range("upsample_factor", half->factor[at], 1, 64))) return s;
        const size_t next = op == VM_ENCODE ? width[at] : width[at] / half->factor[at];
        const bool same = half->resamplers[i] == 0 && next != c;
        if (op == VM_ENCODE ? same || width[at] % parts || c * parts % width[at]
                            : same || next * half->factor[at] != c || width[at] % half->factor[at] ||
                                  (half->added[at] && (c % parts || parts % half->factor[at])))
            return vm_fail(VM_EINVAL,
                           VM_EXPECTED_IN("config", "%s[%zu]", "a width that its resampler makes of %zu", "%zu"),
                           widths, at, c, width[at]);
        c = next;
    }
    return s;
}

static vm_status check_ltx(const vm_arch *a) {
    vm_status s;
    if ((s = in_range("block_out_channels", a->block_out_channels[a->levels - 1], 1, 65536))) return s;
    /* diffusers repeats the first frame before a convolution, not after it: the same only if that is causal */
    if (!a->half[VM_ENCODE].causal)
        return vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "encoder_causal", "true", "false"));
    if ((s = check_half(a, VM_ENCODE))) return s;
    if ((s = check_half(a, VM_DECODE))) return s;
    for (unsigned what = VM_SPACE; what <= VM_TIME; what++)
        if (resamplers(a, VM_ENCODE, what) != resamplers(a, VM_DECODE, what))
            return vm_fail(
                VM_EINVAL,
                VM_EXPECTED_IN("config", "upsample_type", "%zu that are %s, as many as of downsample_type", "%zu"),
                resamplers(a, VM_ENCODE, what), what == VM_SPACE ? "spatial" : "temporal",
                resamplers(a, VM_DECODE, what));
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
        {"norm_num_groups", a->norm_num_groups, a->family == VM_KL || a->family == VM_HUNYUAN_IMAGE,
         a->family == VM_WAN || a->family == VM_LTX ? 0 : 65536},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        vm_status s = in_range(ranges[i].what, ranges[i].value, ranges[i].low, ranges[i].high);
        if (s) return s;
    }
    if (a->family != VM_WAN && (a->residual || a->image_patch))
        return vm_fail(VM_EINVAL,
                       VM_EXPECTED_IN("config", "temperal_downsample, image_patch", "none", "them of another family"));
    if (a->videos && a->family != VM_LTX && (a->family != VM_WAN || !a->slices))
        return vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "videos", "false, as the model is of images", "true"));
    if (a->image_patch && a->image_patch != 2)
        return vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "image_patch", "2", "%zu"), a->image_patch);
    if (a->family == VM_LTX && !a->videos)
        return vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "videos", "true, as the model is of videos", "false"));
    vm_status s;
    if ((s = check_widths(a, VM_ENCODE))) return s;
    if (a->decoder_block_out_channels[0] && (s = check_widths(a, VM_DECODE))) return s;
    if (a->family == VM_LTX && (s = check_ltx(a))) return s;
    if (!(a->norm_eps >= 0))
        return vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "norm_eps", "0 or more", "%g"), (double)a->norm_eps);
    return check_latents(a);
}

bool vm_arch_is_temporal(const vm_arch *a, size_t level) { return a->residual ? a->temporal[level] : level > 0; }

size_t vm_arch_halvings(const vm_arch *a) {
    if (a->family == VM_LTX) return resamplers(a, VM_ENCODE, VM_TIME);
    size_t halvings = 0;
    for (size_t i = 0; a->videos && i + 1 < a->levels; i++) halvings += vm_arch_is_temporal(a, i);
    return halvings;
}

size_t vm_arch_encoded(const vm_arch *a) { return (a->family == VM_TINY ? 1 : 2) * a->latent_channels; }

size_t vm_arch_factor(const vm_arch *a) {
    if (a->family == VM_LTX) return (size_t)4 << resamplers(a, VM_ENCODE, VM_SPACE);
    return (a->image_patch ? 2 : (size_t)1) << (a->levels - 1);
}
