/* GroupNorm, the half of it that is not done on load: from the parts that the producer of x left
 * (pixels, mean and M2 per channel) to one scale and shift per channel.
 *
 * Parts are merged by Chan's formula in double and in their own order, so the result does not
 * depend on which thread made which part. */
#include <math.h>

#include "cpu.h"

void vm_norm_scale(float *scale, float *shift, const vm_pass *pass, const vm_operands *at) {
    const size_t c = pass->x.c, padded = VM_BLOCKS(c) * VM_BLOCK, part = vm_stats_floats(c);
    const size_t width = c / pass->groups;
    for (size_t i = c; i < padded; i++) scale[i] = shift[i] = 0;
    for (size_t g = 0; g < pass->groups; g++) {
        double count = 0, mean = 0, m2 = 0;
        for (size_t p = 0; p < at->x_parts; p++) {
            const float *means = at->x_stats + p * part + VM_BLOCK, *m2s = means + padded;
            const double n = at->x_stats[p * part];
            for (size_t i = g * width; i < (g + 1) * width; i++) {
                const double delta = means[i] - mean, total = count + n;
                mean += delta * n / total;
                m2 += m2s[i] + delta * delta * count * n / total;
                count = total;
            }
        }
        const double r = 1 / sqrt(m2 / count + pass->eps);
        for (size_t i = g * width; i < (g + 1) * width; i++) {
            scale[i] = (float)(r * at->gamma[i]);
            shift[i] = (float)(at->beta[i] - mean * r * at->gamma[i]);
        }
    }
}
