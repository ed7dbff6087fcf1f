/* Convolutions between Python and C. */
#include "py_conv.h"

/* One number for all dimensions, or a sequence of them; `none` stands for the depth where there is none. */
static int to_extents(const char *name, PyObject *value, int dims, int64_t none, int64_t out[VM_CONV_DIMS]) {
    int64_t *own = out + VM_CONV_DIMS - dims;
    out[0] = none;
    if (PyLong_Check(value)) {
        for (int i = 0; i < dims; i++) own[i] = PyLong_AsLongLong(value);
        return PyErr_Occurred() ? -1 : 0;
    }
    PyObject *list = PySequence_Tuple(value); /* a copy: an item's __index__ may change the sequence */
    if (!list && PyErr_ExceptionMatches(PyExc_TypeError))
        PyErr_Format(PyExc_TypeError, "%s: want an int or %d of them, got %R", name, dims, value);
    if (!list) return -1;
    if (PyTuple_GET_SIZE(list) != dims)
        PyErr_Format(PyExc_ValueError, "%s: want an int or %d of them, got %R", name, dims, value);
    for (int i = 0; i < dims && !PyErr_Occurred(); i++) own[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(list, i));
    Py_DECREF(list);
    return PyErr_Occurred() ? -1 : 0;
}

int vm_py_to_conv(const vm_py_conv *from, vm_conv *conv) {
    const int dims = from->depth ? 3 : 2;
    const bool transposed = from->output_padding && from->output_padding != Py_None;
    *conv = (vm_conv){.dtype = from->dtype,
                      .tf32 = true,
                      .nhwc = from->nhwc,
                      .transposed = transposed,
                      .dims = dims,
                      .n = from->n,
                      .c = from->c,
                      .k = from->k,
                      .groups = from->groups,
                      .size = {from->depth ? from->depth : 1, from->h, from->w},
                      .dilation = {1, 1, 1}};
    if (to_extents("r", from->r, dims, 1, conv->filter) || to_extents("stride", from->stride, dims, 1, conv->stride) ||
        to_extents("padding", from->padding, dims, 0, conv->padding))
        return -1;
    if (from->dilation && to_extents("dilation", from->dilation, dims, 1, conv->dilation)) return -1;
    return transposed ? to_extents("output_padding", from->output_padding, dims, 0, conv->output_padding) : 0;
}

static PyObject *from_extents(const int64_t extents[VM_CONV_DIMS], int dims) {
    const int64_t *own = extents + VM_CONV_DIMS - dims;
    bool same = true;
    for (int i = 1; i < dims; i++) same = same && own[i] == own[0];
    if (same) return PyLong_FromLongLong(own[0]);
    if (dims == 2) return Py_BuildValue("(LL)", (long long)own[0], (long long)own[1]);
    return Py_BuildValue("(LLL)", (long long)own[0], (long long)own[1], (long long)own[2]);
}

PyObject *vm_py_from_conv(const vm_conv *c) {
    const int dims = c->dims;
    bool dilated = false;
    for (int i = 0; i < VM_CONV_DIMS; i++) dilated = dilated || c->dilation[i] != 1;
    PyObject *plain =
        Py_BuildValue("(sLLLLLNNNs)", vm_dtype_name(c->dtype), (long long)c->n, (long long)c->c, (long long)c->size[1],
                      (long long)c->size[2], (long long)c->k, from_extents(c->filter, dims),
                      from_extents(c->stride, dims), from_extents(c->padding, dims), c->nhwc ? "nhwc" : "nchw");
    if (!plain || (dims == 2 && !dilated && c->groups == 1 && !c->transposed)) return plain;
    PyObject *rest = Py_BuildValue("(NLNL)", from_extents(c->dilation, dims), (long long)c->groups,
                                   c->transposed ? from_extents(c->output_padding, dims) : Py_NewRef(Py_None),
                                   (long long)(dims == 3 ? c->size[0] : 0));
    PyObject *whole = rest ? PySequence_Concat(plain, rest) : NULL;
    Py_XDECREF(rest);
    Py_DECREF(plain);
    return whole;
}
