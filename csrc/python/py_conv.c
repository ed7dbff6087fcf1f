/* Convolutions between Python and C. */
#include "../predict/trace/trace.h"
#include "py.h"

/* Converts one number for all dimensions, or a sequence of them; `none` is the depth with two dimensions. */
static int to_extents(const char *name, PyObject *value, int dims, int64_t none, int64_t out[VM_CONV_DIMS]) {
    int64_t *own = out + VM_CONV_DIMS - dims;
    out[0] = none;
    if (PyLong_Check(value)) {
        for (int i = 0; i < dims; i++) own[i] = PyLong_AsLongLong(value);
        return PyErr_Occurred() ? -1 : 0;
    }
    PyObject *list = PySequence_Tuple(value); /* a copy: an item's __index__ may change the sequence */
    if (!list && PyErr_ExceptionMatches(PyExc_TypeError))
        vm_py_refuse(PyExc_TypeError, VM_EXPECTED("%s", "an int or %d of them", "%R"), name, dims, value);
    if (!list) return -1;
    if (PyTuple_Size(list) != dims)
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("%s", "an int or %d of them", "%R"), name, dims, value);
    for (int i = 0; i < dims && !PyErr_Occurred(); i++) own[i] = PyLong_AsLongLong(PyTuple_GetItem(list, i));
    Py_DECREF(list);
    return PyErr_Occurred() ? -1 : 0;
}

/* The largest size, stride or padding. Products of two of them fit in 64 bits. */
static const int64_t most_extent = (int64_t)1 << 31;

static int check_extents(const char *name, const int64_t *extent, int count, int64_t least) {
    for (int i = 0; i < count; i++)
        if (extent[i] < least || extent[i] > most_extent) {
            vm_py_refuse(PyExc_ValueError, VM_EXPECTED_IN("conv", "%s", "%lld to 2^31", "%lld"), name, (long long)least,
                         (long long)extent[i]);
            return -1;
        }
    return 0;
}

static int check_conv(const vm_conv *c) {
    const int64_t sizes[] = {c->n, c->c, c->k, c->groups};
    if (check_extents("n, c, k and groups", sizes, 4, 1) || check_extents("sizes", c->size, VM_CONV_DIMS, 1) ||
        check_extents("r", c->filter, VM_CONV_DIMS, 1) || check_extents("stride", c->stride, VM_CONV_DIMS, 1) ||
        check_extents("padding", c->padding, VM_CONV_DIMS, 0) ||
        check_extents("dilation", c->dilation, VM_CONV_DIMS, 1) ||
        check_extents("output_padding", c->output_padding, VM_CONV_DIMS, 0))
        return -1;
    return 0;
}

int vm_py_to_conv(PyObject *question, void *out) {
    vm_conv *conv = out;
    vm_dtype dtype;
    long long n, c, h, w, k, groups = 1, depth = 0;
    PyObject *r, *stride, *padding, *dilation = NULL, *output_padding = Py_None;
    const char *layout;
    if (!PyTuple_Check(question)) {
        vm_py_refuse(PyExc_TypeError, VM_EXPECTED("conv", "a tuple", "%R"), question);
        return 0;
    }
    if (!PyArg_ParseTuple(question, "O&LLLLLOOOs|OLOL:conv", vm_py_to_dtype, &dtype, &n, &c, &h, &w, &k, &r, &stride,
                          &padding, &layout, &dilation, &groups, &output_padding, &depth))
        return 0;
    const int dims = depth ? 3 : 2;
    *conv = (vm_conv){.dtype = dtype,
                      .tf32 = true,
                      .nhwc = !strcmp(layout, "nhwc"),
                      .transposed = output_padding != Py_None,
                      .dims = dims,
                      .n = n,
                      .c = c,
                      .k = k,
                      .groups = groups,
                      .size = {depth ? depth : 1, h, w},
                      .dilation = {1, 1, 1}};
    return !to_extents("r", r, dims, 1, conv->filter) && !to_extents("stride", stride, dims, 1, conv->stride) &&
           !to_extents("padding", padding, dims, 0, conv->padding) &&
           (!dilation || !to_extents("dilation", dilation, dims, 1, conv->dilation)) &&
           (!conv->transposed || !to_extents("output_padding", output_padding, dims, 0, conv->output_padding)) &&
           !check_conv(conv);
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

static PyObject *conv_item(const void *convs, size_t i) { return vm_py_from_conv(&((const vm_conv *)convs)[i]); }

PyObject *vm_py_convs(const vm_conv *conv, size_t count) {
    vm_conv *copy = PyMem_Malloc((count + 1) * sizeof *copy); /* Python code may run meanwhile and append to them */
    if (!copy) return PyErr_NoMemory();
    if (count) memcpy(copy, conv, count * sizeof *copy);
    PyObject *list = vm_py_list(count, conv_item, copy);
    PyMem_Free(copy);
    return list;
}
