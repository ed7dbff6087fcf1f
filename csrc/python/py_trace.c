/* vaemem._core.Trace: what a PyTorch call allocates and frees, built from an architecture or recorded step by step. */
#include "../predict/trace/trace.h"
#include "py.h"

typedef struct Trace {
    PyObject_HEAD
    vm_trace *trace;
} Trace;

static const char *const op_name[] = {[VM_ENCODE] = "encode", [VM_DECODE] = "decode"};
static const char *const step_name[] = {"take", "give", "conv", "cublas", "cublaslt", "empty"};

static PyObject *text_item(const void *names, size_t i) {
    return PyUnicode_FromString(((const char *const *)names)[i]);
}

/* Returns: the index of text among names; -1 with a ValueError that names the argument. */
static int choose(const char *argument, const char *text, const char *const *names, int count) {
    for (int i = 0; i < count; i++)
        if (!strcmp(text, names[i])) return i;
    PyObject *list = vm_py_list((size_t)count, text_item, names);
    if (list) vm_py_refuse(PyExc_ValueError, VM_EXPECTED("%s", "one of %R", "'%s'"), argument, list, text);
    Py_XDECREF(list);
    return -1;
}
#define CHOOSE(argument, text, names) choose(argument, text, names, (int)(sizeof(names) / sizeof *(names)))

PyObject *vm_py_wrap_trace(PyTypeObject *type, vm_trace *trace) {
    Trace *self = (Trace *)PyType_GenericAlloc(type, 0);
    if (self)
        self->trace = trace;
    else
        vm_trace_free(trace);
    return (PyObject *)self;
}

static PyObject *trace_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    vm_trace *trace;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Trace", names)) return NULL;
    vm_status s = vm_trace_new(&trace);
    return s ? vm_py_raise(s) : vm_py_wrap_trace(type, trace);
}

static void trace_dealloc(Trace *self) {
    vm_trace_free(self->trace);
    vm_py_free((PyObject *)self);
}

vm_trace *vm_py_trace(PyObject *object) {
    if (vm_py_is(object, (destructor)trace_dealloc)) return ((Trace *)object)->trace;
    return (void *)vm_py_refuse_type("trace", "a Trace", object);
}

/* ---- from an architecture ---- */

static PyObject *trace_vae(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"arch",          "runtime", "op",      "dtype",        "height",          "width",
                            "batch",         "tile",    "slicing", "sm",           "multiprocessors", "free_bytes",
                            "channels_last", "first",   "passing", "tile_overlap", "release",         "frames",
                            "picture",       NULL};
    const char *runtime, *op;
    vm_arch arch;
    vm_trace_vae vae = {.arch = &arch, .tile_overlap = 0.25, .gpu = {.sm = 89, .multiprocessors = 128}, .release = 42};
    long long height, width, batch = 1, tile = 0, free_bytes = 0, frames = 1;
    int slicing = 0, channels_last = 0, picture = 0;
    PyObject *first = Py_None, *passing = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&ssO&LL|LLpiiLpOOdiLp:vae", names, vm_py_to_arch, &arch, &runtime,
                                     &op, vm_py_to_dtype, &vae.dtype, &height, &width, &batch, &tile, &slicing,
                                     &vae.gpu.sm, &vae.gpu.multiprocessors, &free_bytes, &channels_last, &first,
                                     &passing, &vae.tile_overlap, &vae.release, &frames, &picture))
        return NULL;
    vae.first = vae.dtype;
    if (first != Py_None && !vm_py_to_dtype(first, &vae.first)) return NULL;
    const int r = choose("runtime", runtime, vm_trace_runtime_name, VM_TORCH_RUNTIMES),
              o = r < 0 ? -1 : CHOOSE("op", op, op_name);
    if (o < 0) return NULL;
    if (free_bytes < 0)
        return vm_py_refuse(PyExc_ValueError, VM_EXPECTED("free_bytes", "0 or more", "%lld"), free_bytes);
    if (height < 1 || width < 1 || batch < 1 || tile < 0)
        return vm_py_refuse(
            PyExc_ValueError,
            VM_EXPECTED("height, width, batch, tile", "1 or more (a tile of 0 is none)", "%lld, %lld, %lld, %lld"),
            height, width, batch, tile);
    if (frames < 1) return vm_py_refuse(PyExc_ValueError, VM_EXPECTED("frames", "1 or more", "%lld"), frames);
    vae.runtime = (vm_trace_runtime)r;
    vae.op = (vm_op)o;
    vae.height = (uint64_t)height;
    vae.width = (uint64_t)width;
    vae.batch = (uint64_t)batch;
    vae.frames = (uint64_t)frames;
    vae.tile = (uint64_t)tile;
    vae.gpu.free_bytes = (uint64_t)free_bytes;
    vae.slicing = slicing;
    vae.channels_last = channels_last;
    vae.picture = picture;
    PyObject *texts = passing ? vm_py_to_passings(passing, &vae.passing) : NULL;
    if (passing && !texts) return NULL;
    vm_trace *trace;
    vm_status s;
    Py_BEGIN_ALLOW_THREADS
    s = vm_trace_vae_build(&vae, &trace);
    Py_END_ALLOW_THREADS
    PyMem_Free((void *)vae.passing.item);
    Py_XDECREF(texts);
    return s ? vm_py_raise(s) : vm_py_wrap_trace(type, trace);
}

static PyObject *parameter_item(const void *parameters, size_t i) {
    const vm_parameter *p = &((const vm_parameters *)parameters)->item[i];
    size_t shape[5];
    for (int d = 0; d < p->dims; d++) shape[d] = (size_t)p->shape[d];
    return Py_BuildValue("(sNs)", p->name, vm_py_sizes(shape, (size_t)p->dims), p->integer ? "int64" : "run");
}

static PyObject *trace_parameters(PyObject *Py_UNUSED(type), PyObject *args) {
    const char *runtime;
    vm_arch arch;
    if (!PyArg_ParseTuple(args, "O&s:parameters", vm_py_to_arch, &arch, &runtime)) return NULL;
    const int r = choose("runtime", runtime, vm_trace_runtime_name, VM_TORCH_RUNTIMES);
    if (r < 0) return NULL;
    vm_parameters *found;
    const vm_status s = vm_trace_vae_parameters(&arch, (vm_trace_runtime)r, &found);
    if (s) return vm_py_raise(s);
    PyObject *list = vm_py_list(found->count, parameter_item, found);
    vm_parameters_free(found);
    return list;
}

/* ---- recorded step by step ---- */

static PyObject *trace_take(Trace *self, PyObject *args) {
    unsigned long long bytes;
    const char *name;
    uint32_t id, stream = 0;
    if (!PyArg_ParseTuple(args, "Ks|I:take", &bytes, &name, &stream)) return NULL;
    vm_status s;
    if ((s = vm_trace_own(&self->trace))) return vm_py_raise(s);
    if ((s = vm_trace_take_on(self->trace, stream, bytes, name, &id))) return vm_py_raise(s);
    return PyLong_FromUnsignedLong(id);
}

static PyObject *trace_give(Trace *self, PyObject *number) {
    const unsigned long id = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred()) return NULL;
    const vm_status s = vm_trace_own(&self->trace);
    return vm_py_none_or_raise(s ? s : vm_trace_give(self->trace, (uint32_t)VM_MIN(id, UINT32_MAX)));
}

typedef struct wants {
    const vm_trace *t;
    vm_trace_want want[VM_TRACE_WANTS];
} wants;

static PyObject *want_item(const void *context, size_t i) {
    const wants *w = context;
    const vm_trace_want *one = &w->want[i];
    return Py_BuildValue("(NKK)", PyUnicode_FromString(vm_names_get(&w->t->names, one->name)),
                         (unsigned long long)one->bytes, (unsigned long long)one->before);
}

static PyObject *trace_wants(Trace *self, PyObject *args) {
    unsigned long long low, high, spare = 0;
    int segments;
    if (!PyArg_ParseTuple(args, "KKp|K:wants", &low, &high, &segments, &spare)) return NULL;
    wants found = {.t = self->trace};
    size_t count;
    const vm_status s = vm_trace_wants(self->trace, low, high, segments, spare, found.want, &count);
    return s ? vm_py_raise(s) : vm_py_list(count, want_item, &found);
}

static PyObject *trace_blas(Trace *self, PyObject *args) {
    const char *name;
    int lt = 0;
    if (!PyArg_ParseTuple(args, "s|p:blas", &name, &lt)) return NULL;
    const vm_status s = vm_trace_own(&self->trace);
    return vm_py_none_or_raise(s ? s : vm_trace_blas(self->trace, lt ? VM_TRACE_CUBLASLT : VM_TRACE_CUBLAS, name));
}

static PyObject *trace_conv(Trace *self, PyObject *args) {
    const char *name;
    vm_conv conv;
    if (!PyArg_ParseTuple(args, "O&s:conv", vm_py_to_conv, &conv, &name)) return NULL;
    const vm_status s = vm_trace_own(&self->trace);
    return vm_py_none_or_raise(s ? s : vm_trace_conv(self->trace, &conv, name));
}

/* ---- attention ---- */

/* Returns: whether a value is a tuple, as PyArg_ParseTuple requires; otherwise raises TypeError. */
static bool is_tuple(PyObject *value) {
    if (!PyTuple_Check(value)) vm_py_refuse(PyExc_TypeError, VM_EXPECTED("call", "tuples", "%R"), value);
    return PyTuple_Check(value);
}

/* For PyArg_ParseTuple's O&: queries, keys or values as (shape, strides). */
static int to_heads(PyObject *pair, void *out) {
    PyObject *shape, *strides;
    vm_heads *h = out;
    if (!is_tuple(pair) || !PyArg_ParseTuple(pair, "O!O!:heads", &PyTuple_Type, &shape, &PyTuple_Type, &strides))
        return 0;
    const Py_ssize_t dims = PyTuple_Size(shape);
    uint64_t *const last[4] = {&h->depth, &h->length, &h->heads, &h->batch};
    *h = (vm_heads){.dims = (size_t)dims};
    for (Py_ssize_t i = 0; i < VM_MIN(dims, 4); i++)
        *last[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(shape, dims - 1 - i));
    if (dims != PyTuple_Size(strides))
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("strides", "%zd", "%R"), dims, strides);
    else if (dims)
        h->strided = PyLong_AsLongLong(PyTuple_GetItem(strides, dims - 1)) != 1;
    if (!PyErr_Occurred() && dims == 4)
        h->by_token = PyLong_AsLongLong(PyTuple_GetItem(strides, 1)) < PyLong_AsLongLong(PyTuple_GetItem(strides, 2));
    return !PyErr_Occurred();
}

/* For PyArg_ParseTuple's O&: the tuple AttentionCall of vaemem/pytorch/eager.py. */
static int to_sdpa(PyObject *call, void *out) {
    PyObject *mask;
    vm_sdpa *a = out;
    int boolean = 0, strided = 0, causal, grouped;
    long long elements = 0, row = 0;
    *a = (vm_sdpa){0};
    if (!is_tuple(call) || !PyArg_ParseTuple(call, "O&O&O&O&Opp:call", vm_py_to_dtype, &a->dtype, to_heads, &a->q,
                                             to_heads, &a->k, to_heads, &a->v, &mask, &causal, &grouped))
        return 0;
    a->masked = mask != Py_None;
    if (a->masked && !is_tuple(mask)) return 0;
    if (a->masked && !PyArg_ParseTuple(mask, "LLp|p:mask", &elements, &row, &boolean, &strided)) return 0;
    a->mask = (uint64_t)elements;
    a->mask_row = (uint64_t)row;
    a->boolean = boolean;
    a->mask_strided = strided;
    a->causal = causal;
    a->grouped = grouped;
    return 1;
}

static PyObject *trace_choose_kernel(PyObject *Py_UNUSED(null), PyObject *args) {
    vm_sdpa call;
    vm_trace_gpu gpu = {0};
    PyObject *names;
    vm_attention_kernel enabled[VM_ATTENTION_KERNELS], chosen;
    if (!PyArg_ParseTuple(args, "O&iiO!:choose_kernel", to_sdpa, &call, &gpu.sm, &gpu.cudnn, &PyTuple_Type, &names))
        return NULL;
    const Py_ssize_t count = VM_MIN(PyTuple_Size(names), VM_ATTENTION_KERNELS);
    for (Py_ssize_t i = 0; i < count; i++) {
        const char *name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(names, i), NULL);
        const int k = name ? choose("kernel", name, vm_attention_kernel_name, VM_ATTENTION_KERNELS) : -1;
        if (k < 0) return NULL;
        enabled[i] = (vm_attention_kernel)k;
    }
    vm_status s = vm_sdpa_choose(&call, &gpu, enabled, (size_t)count, &chosen);
    return s ? vm_py_raise(s) : PyUnicode_FromString(vm_attention_kernel_name[chosen]);
}

static PyObject *trace_attend(Trace *self, PyObject *args) {
    vm_sdpa call;
    vm_trace_gpu gpu = {0};
    const char *kernel, *name;
    uint32_t id;
    if (!PyArg_ParseTuple(args, "O&siis:attend", to_sdpa, &call, &kernel, &gpu.sm, &gpu.multiprocessors, &name))
        return NULL;
    const int k = choose("kernel", kernel, vm_attention_kernel_name, VM_ATTENTION_KERNELS);
    if (k < 0) return NULL;
    vm_status s;
    if ((s = vm_trace_own(&self->trace))) return vm_py_raise(s);
    if ((s = vm_trace_attention(self->trace, &call, (vm_attention_kernel)k, &gpu, name, &id))) return vm_py_raise(s);
    return PyLong_FromUnsignedLong(id);
}

/* ---- reading ---- */

static PyObject *step_item(const void *trace, size_t i) {
    const vm_trace *t = trace;
    const vm_trace_step *step = &t->step[i];
    return Py_BuildValue("(sIKN)", step_name[step->op], step->id, (unsigned long long)step->bytes,
                         step->op == VM_TRACE_GIVE ? PyUnicode_FromString("")
                                                   : PyUnicode_FromString(vm_names_get(&t->names, step->name)));
}

static PyObject *trace_convs(Trace *self, void *Py_UNUSED(closure)) {
    return vm_py_convs(self->trace->conv, self->trace->convs);
}

static PyObject *trace_steps(Trace *self, void *Py_UNUSED(closure)) {
    return vm_py_list(self->trace->steps, step_item, self->trace);
}

/* offset: the number's place in vm_trace. */
static PyObject *trace_count(Trace *self, void *offset) {
    return PyLong_FromUnsignedLongLong(*(const uint64_t *)((const char *)self->trace + (size_t)offset));
}

/* ---- the type ---- */

static PyMethodDef methods[] = {
    {"vae", VM_PY_KEYWORDS(trace_vae), METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "vae($type, /, arch, runtime, op, dtype, height, width, batch=1, tile=0, slicing=False, sm=89, "
     "multiprocessors=128, free_bytes=0, channels_last=False, first=None, passing=(), tile_overlap=0.25, "
     "release=42, frames=1, picture=False)\n--\n\nReturns the trace of encode or decode of a VAE, from "
     "its arch dict. "
     "tile: side in "
     "pixels, 0 for none. free_bytes: free GPU memory when the call begins, which a1111 checks; 0: unlimited. "
     "first: the dtype of post_quant_conv, decoder.conv_in and decoder.mid_block, which diffusers' upcast_vae "
     "leaves in half precision. passing: weights that come for some modules' calls, as for Program.trace. "
     "tile_overlap: the part of a side that diffusers' tiles share. release: 38 for diffusers 0.38, whose class "
     "runs a video's VAE. frames: latent frames of AutoencoderKLWan; 1 for an image. picture: whether the "
     "input has a picture's strides, those of (N, H, W, C)."},
    {"parameters", trace_parameters, METH_VARARGS | METH_STATIC,
     "parameters(arch, runtime, /)\n--\n\nReturns [(name, shape, dtype)] in the order in which Module.to moves "
     "them. dtype: run (the module's) or int64."},
    {"take", (PyCFunction)trace_take, METH_VARARGS,
     "take($self, bytes, name, stream=0, /)\n--\n\nTakes a storage, on a stream of PyTorch. Returns its id."},
    {"give", (PyCFunction)trace_give, METH_O, "give($self, id, /)\n--\n\nFrees a storage: its last reference is gone."},
    {"wants", (PyCFunction)trace_wants, METH_VARARGS,
     "wants($self, low, high, segments, spare=0, /)\n--\n\nReturns [(name, bytes, the call's bytes before it)] of "
     "the first storages whose request is from low to high bytes, and which may be refused while `spare` bytes "
     "are cached or free. segments: compare the segment that PyTorch's allocator requests."},
    {"blas", (PyCFunction)trace_blas, METH_VARARGS,
     "blas($self, name, lt=False, /)\n--\n\nAdds a matrix product by cuBLAS, or by cuBLASLt."},
    {"conv", (PyCFunction)trace_conv, METH_VARARGS,
     "conv($self, question, name, /)\n--\n\nAdds a convolution's workspace. question: in the format of convs."},
    {"choose_kernel", trace_choose_kernel, METH_VARARGS | METH_STATIC,
     "choose_kernel(call, sm, cudnn, enabled, /)\n--\n\nReturns the first of the enabled kernels that accepts an "
     "attention on a card of compute capability sm (89 for 8.9) with a version of cuDNN (91900 for 9.19.0, 0 if it is "
     "not known). Raises ValueError if none does: PyTorch would raise."},
    {"attend", (PyCFunction)trace_attend, METH_VARARGS,
     "attend($self, call, kernel, sm, multiprocessors, name, /)\n--\n\nAdds an attention by a chosen kernel, or "
     "by the usual one. Returns the id of its output."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {
    {"convs", (getter)trace_convs, NULL,
     "[(dtype, n, c, h, w, k, r, stride, padding, layout)], each once; unusual ones end with (dilation, groups, "
     "output_padding, depth). r, stride, padding, dilation, output_padding: an int, or a tuple with one per "
     "dimension. output_padding: None unless transposed. depth: 0 with two dimensions.",
     NULL},
    {"steps", (getter)trace_steps, NULL, "[(op, id, bytes, name)]; op: take, give, conv, cublas, cublaslt or empty.",
     NULL},
    {"flops", (getter)trace_count, NULL,
     "FLOPs of convolutions, attentions and a VAE's products; a multiplication and an addition count as two.",
     (void *)offsetof(vm_trace, flops)},
    {"attended", (getter)trace_count, NULL, "The part of flops in fused attentions.",
     (void *)offsetof(vm_trace, attended)},
    {"moved", (getter)trace_count, NULL,
     "Bytes that operators read and write in the device's memory: storages count twice; convolutions add their "
     "input, filters and output, norms their input.",
     (void *)offsetof(vm_trace, moved)},
    {"sent", (getter)trace_count, NULL, "Bytes of the weights sent for the call.", (void *)offsetof(vm_trace, sent)},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_new, trace_new},
    {Py_tp_dealloc, trace_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {Py_tp_doc, "What a PyTorch call allocates and frees in the caching allocator, in order."},
    {0, NULL}};

PyType_Spec vm_py_trace_type = {
    .name = "vaemem._core.Trace", .basicsize = sizeof(Trace), .flags = Py_TPFLAGS_DEFAULT, .slots = slots};
