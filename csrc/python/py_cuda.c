/* vaemem._cuda: GPUs as backends of vaemem._core, and the DLPack capsules that carry arrays in and out. */
#include "../../kernels/cuda/gpu.h"
#include "py_shared.h"

/* ---- Backend ---- */

typedef struct Backend {
    PyObject_HEAD
    PyObject *capsule; /* owns the GPU; models and arrays hold it too */
    vm_gpu *gpu;
} Backend;

static void close_gpu(PyObject *capsule) {
    const vm_backend *b = PyCapsule_GetPointer(capsule, vm_py_backend_name);
    Py_BEGIN_ALLOW_THREADS
    vm_gpu_close(b->self);
    Py_END_ALLOW_THREADS
}

static const char *const convolutions[] = {
    [VM_CONVOLUTION_AUTO] = "auto", [VM_CONVOLUTION_CUDNN] = "cudnn", [VM_CONVOLUTION_OWN] = "own"};

static int to_convolution(PyObject *name, void *out) {
    for (vm_convolution i = VM_CONVOLUTION_AUTO; i <= VM_CONVOLUTION_OWN; i++)
        if (PyUnicode_Check(name) && !PyUnicode_CompareWithASCIIString(name, convolutions[i])) {
            *(vm_convolution *)out = i;
            return 1;
        }
    vm_py_refuse(PyExc_ValueError, VM_EXPECTED("convolution", "auto, cudnn or own", "%R"), name);
    return 0;
}

static PyObject *backend_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"device",   "dtype",       "tf32",  "autotune", "libcuda",
                            "libcudnn", "convolution", "wgmma", "fp8",      NULL};
    vm_gpu_options o = {0};
    int tf32 = 0, autotune = 0, wgmma = 1, fp8 = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|iO&ppzzO&pp:Backend", names, &o.device, vm_py_to_dtype, &o.dtype,
                                     &tf32, &autotune, &o.libcuda, &o.libcudnn, to_convolution, &o.convolution, &wgmma,
                                     &fp8))
        return NULL;
    if (tf32 && o.dtype != VM_F32)
        return vm_py_refuse(PyExc_ValueError, VM_EXPECTED("tf32", "dtype float32", "%s"), vm_dtype_name(o.dtype));
    o.tf32 = tf32;
    o.autotune = autotune;
    o.no_wgmma = !wgmma;
    o.fp8 = fp8;
    vm_gpu *gpu;
    vm_status s;
    Py_BEGIN_ALLOW_THREADS
    s = vm_gpu_open(&o, &gpu);
    Py_END_ALLOW_THREADS
    if (s) return vm_py_raise(s);
    Backend *self = (Backend *)PyType_GenericAlloc(type, 0);
    PyObject *capsule = self ? PyCapsule_New(&gpu->backend, vm_py_backend_name, close_gpu) : NULL;
    if (!capsule) {
        vm_gpu_close(gpu);
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    self->capsule = capsule;
    self->gpu = gpu;
    return (PyObject *)self;
}

static void backend_dealloc(Backend *self) {
    Py_XDECREF(self->capsule);
    vm_py_free((PyObject *)self);
}

static PyObject *backend_memory(Backend *self, PyObject *Py_UNUSED(ignored)) {
    size_t free, total;
    vm_status s = vm_gpu_memory(self->gpu, &free, &total);
    return s ? vm_py_raise(s) : Py_BuildValue("nn", (Py_ssize_t)free, (Py_ssize_t)total);
}

static PyObject *with_stream(Backend *self, PyObject *stream, vm_status (*call)(vm_gpu *gpu, void *stream)) {
    const unsigned long long handle = PyLong_AsUnsignedLongLong(stream);
    if (PyErr_Occurred()) return NULL;
    return vm_py_none_or_raise(call(self->gpu, (void *)(uintptr_t)handle));
}

static PyObject *backend_order(Backend *self, PyObject *stream) { return with_stream(self, stream, vm_gpu_order); }
static PyObject *backend_check_stream(Backend *self, PyObject *stream) {
    return with_stream(self, stream, vm_gpu_check_stream);
}

static PyObject *backend_read(Backend *self, PyObject *args) {
    unsigned long long from;
    Py_buffer to;
    if (!PyArg_ParseTuple(args, "Kw*", &from, &to)) return NULL;
    vm_status s;
    Py_BEGIN_ALLOW_THREADS
    s = vm_gpu_read(self->gpu, to.buf, (const void *)(uintptr_t)from, (size_t)to.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&to);
    return vm_py_none_or_raise(s);
}

static PyObject *get_capsule(Backend *self, void *Py_UNUSED(closure)) { return Py_NewRef(self->capsule); }
static PyObject *get_stream(Backend *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong((uintptr_t)self->gpu->own);
}
static PyObject *get_granularity(Backend *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(self->gpu->backend.granularity);
}
static PyObject *get_unaccounted(Backend *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(self->gpu->unaccounted);
}
static PyObject *get_to_come(Backend *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(vm_gpu_to_come(self->gpu));
}
static PyObject *get_cudnn(Backend *self, void *Py_UNUSED(closure)) {
    if (!self->gpu->convs) Py_RETURN_NONE;
    const size_t v = vm_cudnn_convs_version(self->gpu->convs);
    return PyUnicode_FromFormat("%zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
}

static PyObject *get_convolution(Backend *self, void *Py_UNUSED(closure)) {
    return PyUnicode_FromString(convolutions[self->gpu->own_conv ? VM_CONVOLUTION_OWN : VM_CONVOLUTION_CUDNN]);
}

static PyObject *get_fp8_weights(Backend *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(self->gpu->fp8_weights);
}

static PyObject *get_attention(Backend *self, void *Py_UNUSED(closure)) {
    const vm_attention_shape s = self->gpu->attention;
    return s.pairs ? PyUnicode_FromString("pairs") : PyUnicode_FromFormat("%ux%u", s.queries, s.keys);
}

static PyObject *get_cudnn_plans(Backend *self, void *Py_UNUSED(closure)) {
    const vm_cudnn_convs *convs = self->gpu->convs;
    char text[256];
    PyObject *plans = PyList_New(0);
    for (size_t i = 0; plans && convs && vm_cudnn_convs_describe(convs, i, text, sizeof text); i++) {
        PyObject *line = PyUnicode_FromString(text);
        if (!line || PyList_Append(plans, line)) Py_CLEAR(plans);
        Py_XDECREF(line);
    }
    return plans;
}

static PyMethodDef backend_methods[] = {
    {"memory", (PyCFunction)backend_memory, METH_NOARGS,
     "memory()\n--\n\nReturns the (free, total) bytes of the device now."},
    {"order", (PyCFunction)backend_order, METH_O,
     "order(stream)\n--\n\nOrders work enqueued on stream from now on after the last run."},
    {"check_stream", (PyCFunction)backend_check_stream, METH_O,
     "check_stream(stream)\n--\n\nRaises ValueError if the stream is being captured."},
    {"read", (PyCFunction)backend_read, METH_VARARGS,
     "read(address, to)\n--\n\nWaits for the last run, then fills the writable buffer `to` from the device."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef backend_attributes[] = {
    {"capsule", (getter)get_capsule, NULL, "The backend argument of vaemem._core.Model.", NULL},
    {"stream", (getter)get_stream, NULL, "Its own stream, as an integer.", NULL},
    {"granularity", (getter)get_granularity, NULL, "Memory is held in multiples of this many bytes.", NULL},
    {"unaccounted", (getter)get_unaccounted, NULL,
     "Bytes used by kernels, cuDNN and graphs, by differences of free memory.", NULL},
    {"to_come", (getter)get_to_come, NULL, "Bytes that graphs still to be captured may take.", NULL},
    {"convolution", (getter)get_convolution, NULL, "'own' or 'cudnn': the outcome of auto.", NULL},
    {"fp8_weights", (getter)get_fp8_weights, NULL, "Tensors of weights that were rounded to e4m3.", NULL},
    {"attention", (getter)get_attention, NULL, "The kernel of attention: queries x keys, or 'pairs' (cuda.h).", NULL},
    {"cudnn_plans", (getter)get_cudnn_plans, NULL,
     "cuDNN's plans so far, the newest first: convolution, engine, workspace.", NULL},
    {"cudnn_version", (getter)get_cudnn, NULL, "'9.19.0', or None if our own convolution runs without cuDNN.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot backend_slots[] = {
    {Py_tp_doc,
     "Backend(device=0, dtype='float32', tf32=False, autotune=False, libcuda=None, libcudnn=None, "
     "convolution='auto', wgmma=True, fp8=False)\n--\n\nOne GPU with one type of numbers. libcuda, libcudnn: paths, if "
     "the loader does not find them. wgmma: use the kernels for compute capability 9.0. fp8: multiply e4m3 in them."},
    {Py_tp_new, (void *)backend_new},
    {Py_tp_dealloc, (void *)backend_dealloc},
    {Py_tp_methods, backend_methods},
    {Py_tp_getset, backend_attributes},
    {0, NULL}};

static PyType_Spec backend_spec = {"vaemem._cuda.Backend", sizeof(Backend), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, backend_slots};

/* ---- devices ---- */

static PyObject *describe(const void *driver, size_t index) {
    const vm_driver *d = driver;
    CUdevice device;
    char name[128] = "";
    int major = 0, minor = 0;
    size_t total = 0;
    CUresult r = d->DeviceGet(&device, (int)index);
    if (!r) r = d->DeviceGetName(name, sizeof name, device);
    if (!r) r = d->DeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    if (!r) r = d->DeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
    if (!r) r = d->DeviceTotalMem(&total, device);
    vm_status s = vm_driver_check(d, r, "describing a device");
    return s ? vm_py_raise(s)
             : Py_BuildValue("{s:s, s:(ii), s:n}", "name", name, "capability", major, minor, "total_bytes",
                             (Py_ssize_t)total);
}

static PyObject *devices(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *libcuda = NULL;
    if (!PyArg_ParseTuple(args, "|z", &libcuda)) return NULL;
    const vm_driver *d;
    int count = 0;
    Py_BEGIN_ALLOW_THREADS
    d = vm_driver_get(libcuda);
    Py_END_ALLOW_THREADS
    if (!d) return vm_py_raise(VM_EDEVICE);
    vm_status s = vm_driver_check(d, d->DeviceGetCount(&count), "counting devices");
    return s ? vm_py_raise(s) : vm_py_list((size_t)count, describe, d);
}

/* ---- DLPack: the structures of its ABI in version 0.x, which every library understands ---- */

typedef struct DLTensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
    DLTensor tensor;
    void *context;
    void (*deleter)(struct DLManagedTensor *);
} DLManagedTensor;

enum { DL_CUDA = 2, DL_MAX_DIMS = 8 };

static const struct {
    const char *name;
    uint8_t code, bits;
} dl_dtypes[] = {{"float32", 2, 32}, {"float16", 2, 16}, {"bfloat16", 4, 16}, {"uint8", 1, 8}};

static const char borrowed_name[] = "vaemem.borrowed";

static void end_borrowing(PyObject *capsule) {
    DLManagedTensor *m = PyCapsule_GetPointer(capsule, borrowed_name);
    if (m && m->deleter) m->deleter(m);
}

static bool contiguous(const DLTensor *t) {
    int64_t want = 1;
    for (int i = t->ndim; t->strides && i-- > 0; want *= t->shape[i])
        if (t->shape[i] != 1 && t->strides[i] != want) return false;
    return true;
}

static PyObject *borrow(PyObject *Py_UNUSED(module), PyObject *capsule) {
    DLManagedTensor *m = PyCapsule_GetPointer(capsule, "dltensor");
    if (!m) return NULL;
    const DLTensor *t = &m->tensor;
    const char *dtype = NULL;
    for (size_t i = 0; i < sizeof dl_dtypes / sizeof *dl_dtypes; i++)
        if (t->dtype.code == dl_dtypes[i].code && t->dtype.bits == dl_dtypes[i].bits && t->dtype.lanes == 1)
            dtype = dl_dtypes[i].name;
    PyObject *shape = PyTuple_New(t->ndim);
    for (int i = 0; shape && i < t->ndim; i++) PyTuple_SetItem(shape, i, PyLong_FromLongLong(t->shape[i]));
    PyObject *result = shape ? Py_BuildValue("{s:K, s:N, s:z, s:O}", "address",
                                             (unsigned long long)((uintptr_t)t->data + t->byte_offset), "shape", shape,
                                             "dtype", dtype, "contiguous", contiguous(t) ? Py_True : Py_False)
                             : NULL;
    PyObject *owner = result ? PyCapsule_New(m, borrowed_name, end_borrowing) : NULL;
    if (!owner) {
        Py_XDECREF(result);
        return NULL;
    }
    PyCapsule_SetName(capsule, "used_dltensor"); /* the owner deletes it from here on */
    const int failed = PyDict_SetItemString(result, "owner", owner);
    Py_DECREF(owner);
    if (!failed) return result;
    Py_DECREF(result);
    return NULL;
}

typedef struct lent {
    DLManagedTensor managed;
    int64_t shape[DL_MAX_DIMS];
} lent;

static void end_lending(DLManagedTensor *m) {
    PyGILState_STATE state = PyGILState_Ensure();
    Py_XDECREF((PyObject *)m->context);
    free(m);
    PyGILState_Release(state);
}

static void drop_capsule(PyObject *capsule) { /* nobody consumed it */
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;
    DLManagedTensor *m = PyCapsule_GetPointer(capsule, "dltensor");
    m->deleter(m);
}

static PyObject *lend(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long address;
    PyObject *shape, *owner;
    const char *dtype;
    int device;
    if (!PyArg_ParseTuple(args, "KO!siO", &address, &PyTuple_Type, &shape, &dtype, &device, &owner)) return NULL;
    const Py_ssize_t dims = PyTuple_Size(shape);
    if (dims > DL_MAX_DIMS)
        return vm_py_refuse(PyExc_ValueError, VM_EXPECTED("shape", "%d dimensions at most", ""), DL_MAX_DIMS);
    lent *l = calloc(1, sizeof *l);
    if (!l) return PyErr_NoMemory();
    l->managed.tensor = (DLTensor){.data = (void *)(uintptr_t)address, .ndim = (int32_t)dims, .shape = l->shape};
    l->managed.tensor.device.type = DL_CUDA;
    l->managed.tensor.device.id = device;
    for (Py_ssize_t i = 0; i < dims && !PyErr_Occurred(); i++)
        l->shape[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    for (size_t i = 0; i < sizeof dl_dtypes / sizeof *dl_dtypes; i++)
        if (!strcmp(dtype, dl_dtypes[i].name)) {
            l->managed.tensor.dtype.code = dl_dtypes[i].code;
            l->managed.tensor.dtype.bits = dl_dtypes[i].bits;
            l->managed.tensor.dtype.lanes = 1;
        }
    if (!PyErr_Occurred() && !l->managed.tensor.dtype.lanes)
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("dtype", "float32, float16, bfloat16 or uint8", "'%s'"), dtype);
    PyObject *capsule = PyErr_Occurred() ? NULL : PyCapsule_New(&l->managed, "dltensor", drop_capsule);
    if (!capsule) {
        free(l);
        return NULL;
    }
    l->managed.context = Py_NewRef(owner);
    l->managed.deleter = end_lending;
    return capsule;
}

static PyMethodDef functions[] = {
    {"devices", devices, METH_VARARGS,
     "devices(libcuda=None)\n--\n\nReturns [{name, capability, total_bytes}]. Raises RuntimeError with the reason "
     "if there are none."},
    {"borrow", borrow, METH_O,
     "borrow(capsule)\n--\n\nReturns a DLPack capsule's contents as a dict. The tensor lives as long as the "
     "dict's 'owner'; 'dtype' is None for an unsupported type."},
    {"lend", lend, METH_VARARGS,
     "lend(address, shape, dtype, device, owner)\n--\n\nReturns a DLPack capsule of packed device memory that "
     "owner keeps alive."},
    {NULL, NULL, 0, NULL}};

static int exec_module(PyObject *module) { return vm_py_add_type(module, &backend_spec); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)exec_module},
#ifdef Py_mod_multiple_interpreters
                                   {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
                                   {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "vaemem._cuda",
                                        .m_doc = "GPUs as backends of vaemem._core.", .m_methods = functions,
                                        .m_slots = slots};

PyMODINIT_FUNC PyInit__cuda(void) { return PyModuleDef_Init(&definition); }
