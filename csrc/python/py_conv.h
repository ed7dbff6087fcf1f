/* A convolution's arguments, as Cudnn.conv and Trace.conv take them and Trace.convs gives them back. */
#ifndef VM_PY_CONV_H
#define VM_PY_CONV_H

#include "py.h"
#include "../predict/workspace.h"

/* What was parsed: r, stride, padding, dilation and output_padding are an int, or a tuple with one for each dimension;
 * output_padding is None where nothing is transposed; depth is 0 with two dimensions. */
typedef struct vm_py_conv {
    vm_dtype dtype;
    long long n, c, h, w, k, groups, depth;
    PyObject *r, *stride, *padding, *dilation, *output_padding;
    int nhwc;
} vm_py_conv;

/* -1 with an exception set. */
int vm_py_to_conv(const vm_py_conv *from, vm_conv *conv);
/* (dtype, n, c, h, w, k, r, stride, padding, layout), then, if any, (dilation, groups, output_padding, depth). */
PyObject *vm_py_from_conv(const vm_conv *conv);

#endif
