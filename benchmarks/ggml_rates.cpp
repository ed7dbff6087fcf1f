/* What ggml's products reach on one core, built for one instruction set or another: GFLOP/s for data/rates.json.
 *
 * With ggml's sources in GGML (tried with those that stable-diffusion.cpp brings), for SSE4.2 alone; -DGGML_AVX=ON
 * -DGGML_F16C=ON for AVX, and -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_BMI2=ON beside these for AVX2:
 *
 *   cmake -S $GGML -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=OFF \
 *     -DGGML_AVX2=OFF -DGGML_FMA=OFF -DGGML_F16C=OFF -DGGML_BMI2=OFF -DGGML_OPENMP=OFF -DBUILD_SHARED_LIBS=OFF
 *   cmake --build build --target ggml
 *   g++ -O2 -I$GGML/include benchmarks/ggml_rates.cpp build/src/libggml.a build/src/libggml-cpu.a \
 *     build/src/libggml-base.a -lpthread -ldl && ./a.out
 */
#include "ggml-cpu.h"
#include "ggml.h"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

/* Weights of n rows of k numbers, multiplied by m columns; the best of four. */
static double gflops(ggml_type type, int k, int n, int m) {
    ggml_context *context = ggml_init({size_t(1) << 30, nullptr, false});
    ggml_tensor *weights = ggml_new_tensor_2d(context, type, k, n);
    ggml_tensor *columns = ggml_new_tensor_2d(context, GGML_TYPE_F32, k, m);
    memset(weights->data, 0, ggml_nbytes(weights));
    if (type == GGML_TYPE_F16)
        std::fill_n((ggml_fp16_t *)weights->data, ggml_nelements(weights), ggml_fp32_to_fp16(0.01f));
    std::fill_n((float *)columns->data, ggml_nelements(columns), 0.5f);
    ggml_cgraph *graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, ggml_mul_mat(context, weights, columns));
    double best = 1e30;
    for (int i = 0; i < 4; i++) {
        auto start = std::chrono::steady_clock::now();
        ggml_graph_compute_with_ctx(context, graph, 1);
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    ggml_free(context);
    return 2.0 * k * n * m / best / 1e9;
}

int main() {
    printf("AVX %d, AVX2 %d, F16C %d\n", ggml_cpu_has_avx(), ggml_cpu_has_avx2(), ggml_cpu_has_f16c());
    printf("float16, 3x3 128 -> 128 of 4096 pixels: %.2f\n", gflops(GGML_TYPE_F16, 1152, 128, 4096));
    printf("float16, 3x3 512 -> 512 of 512 pixels: %.2f\n", gflops(GGML_TYPE_F16, 4608, 512, 512));
    printf("Q8_0, 2560 x 2560, 32 columns: %.2f\n", gflops(GGML_TYPE_Q8_0, 2560, 2560, 32));
}
