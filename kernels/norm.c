/* The half of norms that is not done on load: one scale and shift per channel. GroupNorm's come from the tiles' partial
 * sums (pixels, mean and M2 per channel), merged into those of the whole tensor.
 *
 * Chan's formula merges sums in double, tile by tile in the order of the tiles. So the result does not depend on which
 * thread made a sum, nor on how many rows of tiles were made at a time. */
#include <math.h>
#include <string.h>

#include "cpu.h"

vm_status vm_merge_rows(const vm_tasks *tasks, size_t row, size_t rows) {
    const vm_work *w = tasks->job;
    const size_t padded = VM_BLOCKS(w->pass->y.c) * VM_BLOCK, floats = vm_stats_floats(w->pass->y.c);
    double *count = w->sums, *mean = count + VM_BLOCK, *m2 = mean + padded;
    if (!row) memset(count, 0, floats * sizeof *count);
    for (size_t t = row * w->cut.columns; t < (row + rows) * w->cut.columns; t++) {
        const float *part = w->parts + t % (w->at.manner.at_once * w->cut.columns) * floats, *means = part + VM_BLOCK;
        const double total = *count + part[0], share = part[0] / total, weight = *count * share;
        for (size_t i = 0; i < padded; i++) {
            const double delta = means[i] - mean[i];
            mean[i] += delta * share;
            m2[i] += means[padded + i] + delta * delta * weight;
        }
        *count = total;
    }
    for (size_t i = 0; row + rows == w->cut.rows && i < floats; i++) w->at.y_stats[i] = (float)count[i];
    return VM_OK;
}

void vm_norm_scale(float *scale, float *shift, const vm_pass *pass, const vm_operands *at) {
    const size_t c = pass->x.c, padded = VM_BLOCKS(c) * VM_BLOCK, part = vm_stats_floats(c);
    const bool by_pixel = vm_norm_by_pixel(pass->norm);
    for (size_t i = by_pixel ? 0 : c; i < padded; i++) scale[i] = shift[i] = 0;
    for (size_t i = 0; by_pixel && i < c; i++)
        scale[i] = (float)(sqrt((double)c) * (pass->norm == VM_NORM_PIXEL ? (double)at->gamma[i] : 1));
    if (by_pixel) return;
    const size_t width = c / pass->groups;
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
        const double r = 1 / sqrt(m2 / count + pass->eps * (double)pass->x_scale * (double)pass->x_scale);
        for (size_t i = g * width; i < (g + 1) * width; i++) {
            scale[i] = (float)(r * at->gamma[i]);
            shift[i] = (float)(at->beta[i] - mean * r * at->gamma[i]);
        }
    }
}
