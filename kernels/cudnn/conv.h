/* One of PyTorch's convolutions, described for cuDNN. A one-dimensional one has two dimensions here, with height 1. The
 * bias is added separately. If the paddings of two sides differ, PyTorch first pads into another tensor. */
#ifndef VM_CUDNN_CONV_H
#define VM_CUDNN_CONV_H

#include "../kernels.h"

enum { VM_CONV_DIMS = 3 };

/* A convolution: cross-correlation without bias, the same padding on both sides. Extents are depth, height and width;
 * with two dimensions the depth is one slice. */
typedef struct vm_conv {
    vm_dtype dtype;             /* of input, filter and output; sums are float */
    bool tf32;                  /* float input may run on TF32 tensor cores (torch.backends.cudnn.allow_tf32) */
    bool nhwc;                  /* channels_last tensors and filters */
    bool transposed;            /* the gradient of a convolution by its input */
    int dims;                   /* 2 or 3 */
    int64_t n, c, k, groups;    /* batch, channels of the input and of the output */
    int64_t size[VM_CONV_DIMS]; /* of the input */
    int64_t filter[VM_CONV_DIMS], stride[VM_CONV_DIMS], padding[VM_CONV_DIMS], dilation[VM_CONV_DIMS];
    int64_t output_padding[VM_CONV_DIMS]; /* additional rows of a transposed convolution's output */
} vm_conv;

/* Two dimensions, square filters, one group. x: n, c, h, w. */
static inline vm_conv vm_conv_square(vm_dtype dtype, const int64_t x[4], int64_t k, int64_t side, int64_t stride,
                                     int64_t padding) {
    return (vm_conv){.dtype = dtype,
                     .dims = 2,
                     .n = x[0],
                     .c = x[1],
                     .k = k,
                     .groups = 1,
                     .size = {1, x[2], x[3]},
                     .filter = {1, side, side},
                     .stride = {1, stride, stride},
                     .padding = {0, padding, padding},
                     .dilation = {1, 1, 1}};
}

static inline bool vm_conv_same(const vm_conv *a, const vm_conv *b) {
    bool same = a->dtype == b->dtype && a->tf32 == b->tf32 && a->nhwc == b->nhwc && a->transposed == b->transposed &&
                a->dims == b->dims && a->n == b->n && a->c == b->c && a->k == b->k && a->groups == b->groups;
    for (int i = 0; i < VM_CONV_DIMS; i++)
        same = same && a->size[i] == b->size[i] && a->filter[i] == b->filter[i] && a->stride[i] == b->stride[i] &&
               a->padding[i] == b->padding[i] && a->dilation[i] == b->dilation[i] &&
               a->output_padding[i] == b->output_padding[i];
    return same;
}

#endif
