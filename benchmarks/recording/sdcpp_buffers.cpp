/* What stable-diffusion.cpp reserves for a component's graph, without weights, without a GPU, and without computing it.
 *
 * Its own runner builds the graph and ggml's own allocator lays it out, for the CPU or for a device that is none: one that
 * answers as ggml-cuda does (alignment, sizes of quantised tensors, which operations there are) and stores nothing.
 *
 *     sdcpp_buffers COMPONENT MODEL cpu|cuda LATENT_HEIGHT LATENT_WIDTH TOKENS TYPE [direct] [flash] [scale]
 *
 * prints the bytes of the compute buffer and of the weights. Built in a checkout of stable-diffusion.cpp, with ggml
 * configured by cmake -DBUILD_SHARED_LIBS=OFF -DGGML_OPENMP=OFF -DCMAKE_C(XX)_FLAGS=-DGGML_MAX_NAME=128 into build/:
 *
 *     g++ -std=c++17 -DGGML_MAX_NAME=128 -Isrc -Iinclude -Ithirdparty -Iggml/include -Iggml/src sdcpp_buffers.cpp \
 *         src/{util,model,name_conversion,tokenize_util}.cpp src/vocab/vocab.cpp thirdparty/zip.c \
 *         build/src/libggml{,-cpu,-base}.a -lpthread -ldl -o sdcpp_buffers
 */
// The standard headers first: what follows them is read with every member public.
#include <algorithm>
#include <any>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <future>
#include <iomanip>
#include <iostream>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <queue>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>
#define protected public
#define private public
#include "ggml_extend.hpp"
#include "vae.hpp"
#include "z_image.hpp"
#include "llm.hpp"
#include "unet.hpp"
#include "t5.hpp"
#include "ggml-backend-impl.h"

// ---- a device that stores nothing ----

static ggml_backend_buffer_type no_memory;
static ggml_backend_device no_device;

static ggml_backend_buffer_t no_buffer(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_i i = {};
    i.free_buffer = [](ggml_backend_buffer_t) {};
    i.get_base = [](ggml_backend_buffer_t) { return (void *)0x100000000ull; };
    i.set_tensor = [](ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {};
    i.get_tensor = [](ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t) {};
    i.clear = [](ggml_backend_buffer_t, uint8_t) {};
    return ggml_backend_buffer_init(type, i, nullptr, size);
}

static size_t size_on_cuda(ggml_backend_buffer_type_t, const ggml_tensor *t) {
    size_t more = ggml_is_quantized(t->type) && t->ne[0] % 512 ? ggml_row_size(t->type, 512 - t->ne[0] % 512) : 0;
    return ggml_nbytes(t) + more;
}

static bool cuda_supports(ggml_backend_dev_t, const ggml_tensor *op) {
    static const std::set<int64_t> depths = {40, 64, 72, 80, 96, 112, 128, 256};
    if (op->op != GGML_OP_FLASH_ATTN_EXT)
        return true;
    const ggml_tensor *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    return depths.count(k->ne[0]) && v->ne[0] == k->ne[0] && (!mask || mask->ne[2] == 1);
}

static ggml_backend_t like_cuda() {
    no_memory.iface.get_name = [](ggml_backend_buffer_type_t) { return "none"; };
    no_memory.iface.alloc_buffer = no_buffer;
    no_memory.iface.get_alignment = [](ggml_backend_buffer_type_t) { return (size_t)128; };
    no_memory.iface.get_alloc_size = size_on_cuda;
    no_memory.device = &no_device;
    no_device.iface.get_buffer_type = [](ggml_backend_dev_t) { return &no_memory; };
    no_device.iface.supports_op = cuda_supports;
    static ggml_guid guid = {1};
    static ggml_backend backend = {};
    backend.guid = &guid;
    backend.device = &no_device;
    backend.iface.get_name = [](ggml_backend_t) { return "none"; };
    backend.iface.free = [](ggml_backend_t) {};
    return &backend;
}

// ---- one graph ----

static bool is_direct, is_flash, is_scaled;

static void report(GGMLRunner &r, std::function<ggml_cgraph *()> graph) {
    r.set_conv2d_direct_enabled(is_direct);
    r.set_flash_attention_enabled(is_flash);
    if (!r.alloc_params_buffer() || !r.alloc_compute_buffer(graph))
        std::_Exit(1);
    printf("%zu,%zu\n", ggml_gallocr_get_buffer_size(r.compute_allocr, 0), r.get_params_buffer_size());
    fflush(stdout);
    std::_Exit(0);  // nothing to give back
}

int main(int argc, char **argv) {
    if (argc < 8)
        return fprintf(stderr, "want COMPONENT MODEL cpu|cuda LATENT_HEIGHT LATENT_WIDTH TOKENS TYPE [options]\n"), 2;
    std::string component = argv[1], model = argv[2], type_name = argv[7];
    ggml_backend_t backend = !strcmp(argv[3], "cpu") ? ggml_backend_cpu_init() : like_cuda();
    int h = atoi(argv[4]), w = atoi(argv[5]), n = atoi(argv[6]);
    for (int i = 8; i < argc; i++) {
        is_direct |= !strcmp(argv[i], "direct");
        is_flash |= !strcmp(argv[i], "flash");
        is_scaled |= !strcmp(argv[i], "scale");
    }
    ggml_type type = GGML_TYPE_COUNT;
    for (int i = 0; i < GGML_TYPE_COUNT; i++)
        if (ggml_type_name((ggml_type)i) && type_name == ggml_type_name((ggml_type)i))
            type = (ggml_type)i;

    ggml_context *work = ggml_init({(size_t)1 << 30, nullptr, true});
    auto input = [&](std::vector<int64_t> ne, ggml_type kind = GGML_TYPE_F32) {
        ggml_tensor *t = ggml_new_tensor(work, kind, ne.size(), ne.data());
        t->data = malloc(64);  // never read
        return t;
    };
    String2TensorStorage file;  // names, types and shapes of the weights, as a model's file has them
    auto add = [&](const std::string &name, ggml_type kind, std::vector<int64_t> ne) {
        ne.resize(4, 1);
        file[name] = TensorStorage(name, kind, ne.data(), 4, 0);
        file[name].n_dims = ne[3] > 1 ? 4 : ne[2] > 1 ? 3 : ne[1] > 1 ? 2 : 1;
    };
    // Matrices of the type asked for, under the names that a runner made without a type has.
    auto name_weights = [&](auto &&untyped) {
        std::map<std::string, ggml_tensor *> tensors;
        untyped.get_param_tensors(tensors, "m");
        file.clear();
        for (auto &[name, t] : tensors) {
            bool is_matrix = ggml_n_dims(t) == 2 && t->type == GGML_TYPE_F32 && ends_with(name, "weight");
            add(name, is_matrix ? type : t->type, {t->ne[0], t->ne[1], t->ne[2], t->ne[3]});
        }
    };

    if (component == "vae-decoder" || component == "vae-encoder") {
        bool decode = component == "vae-decoder";
        AutoEncoderKL r(backend, false, file, "m", decode, false, model == "flux" ? VERSION_FLUX : VERSION_SDXL);
        if (is_scaled)
            r.set_conv2d_scale(1.f / 32);
        ggml_tensor *x = decode ? input({w, h, model == "flux" ? 16 : 4, 1}) : input({8 * w, 8 * h, 3, 1});
        report(r, [&] { return r.build_graph(x, decode); });
    } else if (component == "zimage") {
        name_weights(ZImage::ZImageRunner(backend, false, {}, "m"));
        ZImage::ZImageRunner r(backend, false, file, "m");
        ggml_tensor *x = input({w, h, 16, 1}), *t = input({1}), *context = input({2560, n, 1});
        report(r, [&] { return r.build_graph(x, t, context); });
    } else if (component == "qwen3-4b") {
        add("m.model.embed_tokens.weight", GGML_TYPE_F32, {2560, 151936});
        for (int i = 0; i < 36; i++)
            add("m.model.layers." + std::to_string(i) + ".mlp.gate_proj.weight", GGML_TYPE_F32, {2560, 9728});
        name_weights(LLM::LLMRunner(LLM::LLMArch::QWEN3, backend, false, file, "m"));
        LLM::LLMRunner r(LLM::LLMArch::QWEN3, backend, false, file, "m");
        ggml_tensor *ids = input({n}, GGML_TYPE_I32);
        report(r, [&] { return r.build_graph(ids, nullptr, {}, {35}); });
    } else if (component == "unet-sd15" || component == "unet-sdxl") {
        bool xl = component == "unet-sdxl";
        SDVersion version = xl ? VERSION_SDXL : VERSION_SD1;
        name_weights(UNetModelRunner(backend, false, {}, "m", version));
        UNetModelRunner r(backend, false, file, "m", version);
        ggml_tensor *x = input({w, h, 4, 1}), *t = input({1}), *context = input({xl ? 2048 : 768, n, 1});
        ggml_tensor *labels = xl ? input({2816}) : nullptr;
        report(r, [&] { return r.build_graph(x, t, context, nullptr, labels); });
    } else if (component == "flux-dev" || component == "flux-schnell") {
        add("m.txt_in.weight", GGML_TYPE_F32, {4096, 3072});
        add("m.single_blocks.0.norm.key_norm.scale", GGML_TYPE_F32, {128});
        if (component == "flux-dev")
            add("m.guidance_in.in_layer.weight", GGML_TYPE_F32, {256, 3072});
        add("m.double_blocks.18.", GGML_TYPE_F32, {1});
        add("m.single_blocks.37.", GGML_TYPE_F32, {1});
        name_weights(Flux::FluxRunner(backend, false, file, "m"));
        Flux::FluxRunner r(backend, false, file, "m");
        ggml_tensor *x = input({w, h, 16, 1}), *t = input({1}), *context = input({4096, n, 1});
        ggml_tensor *pooled = input({768}), *guidance = input({1});
        report(r, [&] { return r.build_graph(x, t, context, nullptr, pooled, guidance); });
    } else if (component == "clip-l" || component == "clip-g") {
        CLIPVersion version = component == "clip-l" ? OPENAI_CLIP_VIT_L_14 : OPEN_CLIP_VIT_BIGG_14;
        name_weights(CLIPTextModelRunner(backend, false, {}, "m", version));
        CLIPTextModelRunner r(backend, false, file, "m", version);
        ggml_tensor *ids = input({n}, GGML_TYPE_I32);
        report(r, [&] { return r.build_graph(ids); });
    } else if (component == "t5-xxl") {
        name_weights(T5Runner(backend, false, {}, "m"));
        T5Runner r(backend, false, file, "m");
        ggml_tensor *ids = input({n}, GGML_TYPE_I32);
        report(r, [&] { return r.build_graph(ids); });
    }
    return fprintf(stderr, "unknown component %s\n", argv[1]), 2;
}
