/* vaemem._core.Model: an architecture with its weights, for vaemem/engine/vae.py. py_run.c plans and runs it. */
#include "py_model.h"
#include "py_numpy.h"

static int parse_parts(const char *text, unsigned *parts) {
    *parts = !strcmp(text, "all") ? VM_ENCODER | VM_DECODER : !strcmp(text, "encoder") ? VM_ENCODER : VM_DECODER;
    if (*parts != VM_DECODER || !strcmp(text, "decoder")) return 0;
    vm_py_refuse(PyExc_ValueError, VM_EXPECTED("parts", "all, encoder or decoder", "'%s'"), text);
    return -1;
}

static PyObject *model_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"arch", "parts", "backend", "dtype", "precision", NULL};
    PyObject *capsule = Py_None;
    const vm_backend *backend = NULL;
    const char *parts_name = "all";
    unsigned parts;
    vm_arch arch;
    vm_dtype dtype = VM_F32;
    vm_precision precision = VM_HIGHEST;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|sOO&O&", names, vm_py_to_arch, &arch, &parts_name, &capsule,
                                     vm_py_to_dtype, &dtype, vm_py_to_precision, &precision) ||
        parse_parts(parts_name, &parts))
        return NULL;
    backend =
        capsule == Py_None ? vm_backend_at(dtype, precision, 0) : PyCapsule_GetPointer(capsule, vm_py_backend_name);
    if (!backend) return NULL;
    Model *self = (Model *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->backend = Py_NewRef(capsule);
    const bool locked = !vm_py_lock_new(&self->lock);
    return vm_py_made((PyObject *)self, locked ? vm_model_new(&arch, parts, backend, &self->model) : VM_ENOMEM);
}

static void model_dealloc(Model *self) {
    vm_model_free(self->model);
    Py_XDECREF(self->backend);
    vm_py_lock_free(&self->lock);
    vm_py_free((PyObject *)self);
}

/* ---- weights ---- */

static PyObject *tensor_item(const void *tensors, size_t i) {
    const vm_tensor *t = (const vm_tensor *)tensors + i;
    return Py_BuildValue("(sN)", t->name, vm_py_sizes(t->shape, t->dims));
}

static PyObject *model_tensors(Model *self, void *Py_UNUSED(closure)) {
    return vm_py_list(self->model->tensors, tensor_item, self->model->tensor);
}

static PyObject *model_arch(Model *self, void *Py_UNUSED(closure)) { return vm_py_arch_to_dict(&self->model->arch); }

static PyObject *model_parts(Model *self, void *Py_UNUSED(closure)) {
    const unsigned p = self->model->parts;
    return PyUnicode_FromString(p == VM_ENCODER ? "encoder" : p == VM_DECODER ? "decoder" : "all");
}

static PyObject *model_dtype(Model *self, void *Py_UNUSED(closure)) {
    return PyUnicode_FromString(vm_dtype_name(self->model->backend->dtype));
}

static PyObject *model_precision(Model *self, void *Py_UNUSED(closure)) {
    return PyUnicode_FromString(vm_precision_name(self->model->backend->precision));
}

static PyObject *model_reserved(Model *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(vm_mem_usage(self->model->mem).reserved);
}

static PyObject *rounded_item(const void *tensors, size_t i) {
    const vm_tensor *t = (const vm_tensor *)tensors + i;
    return t->rounded ? PyUnicode_FromString(t->name) : NULL;
}

static PyObject *missing_item(const void *tensors, size_t i) {
    const vm_tensor *t = (const vm_tensor *)tensors + i;
    return t->set ? NULL : PyUnicode_FromString(t->name);
}

static PyObject *names(Model *self, PyObject *(*item)(const void *tensors, size_t i)) {
    if (vm_py_acquire_to_read(&self->lock, "save")) return NULL; /* save begins with the check for missing weights */
    PyObject *list = vm_py_list(self->model->tensors, item, self->model->tensor);
    vm_py_release(&self->lock);
    return list;
}

static PyObject *model_rounded(Model *self, PyObject *Py_UNUSED(ignored)) { return names(self, rounded_item); }
static PyObject *model_missing(Model *self, PyObject *Py_UNUSED(ignored)) { return names(self, missing_item); }

static const vm_tensor *find_tensor(Model *self, const char *name) {
    const vm_tensor *t = vm_weights_find(self->model, name);
    if (!t) PyErr_Format(PyExc_KeyError, "tensor: this model has no %s", name);
    return t;
}

/* Imports NumPy when the first array of weights comes: the import takes longer than most predictions. */
static int import_numpy(void) { return PyArray_ImportNumPyAPI() < 0; }

/* ml_dtypes' type, which NumPy knows only by name. */
static bool is_bfloat16(PyArrayObject *a) {
    PyArray_Descr *d = PyArray_DESCR(a);
    PyObject *name = PyDataType_ELSIZE(d) == 2 ? PyType_GetName(d->typeobj) : NULL;
    const bool is = name && !PyUnicode_CompareWithASCIIString(name, "bfloat16");
    PyErr_Clear();
    Py_XDECREF(name);
    return is;
}

static int dtype_of(PyArrayObject *a, vm_dtype *dtype) {
    PyArray_Descr *d = PyArray_DESCR(a);
    *dtype = d->type_num == NPY_HALF ? VM_F16 : d->type_num == NPY_FLOAT ? VM_F32 : VM_BF16;
    if (*dtype != VM_BF16 || is_bfloat16(a)) return 0;
    vm_py_refuse(PyExc_TypeError, VM_EXPECTED("array", "float32, float16 or bfloat16", "%R"), (PyObject *)d);
    return -1;
}

static PyObject *model_set_tensor(Model *self, PyObject *args) {
    const char *name;
    PyArrayObject *a;
    vm_dtype dtype;
    if (import_numpy() || !PyArg_ParseTuple(args, "sO!", &name, &PyArray_Type, &a)) return NULL;
    const vm_tensor *t = find_tensor(self, name);
    if (!t || dtype_of(a, &dtype)) return NULL;
    bool same = (size_t)PyArray_NDIM(a) == t->dims;
    for (size_t i = 0; same && i < t->dims; i++) same = (size_t)PyArray_DIM(a, (int)i) == t->shape[i];
    if (!same) {
        PyObject *want = vm_py_sizes(t->shape, t->dims), *got = PyObject_GetAttrString((PyObject *)a, "shape");
        if (want && got) vm_py_refuse(PyExc_ValueError, VM_EXPECTED("%s", "shape %R", "%R"), name, want, got);
        Py_XDECREF(want);
        Py_XDECREF(got);
        return NULL;
    }
    if (!PyArray_IS_C_CONTIGUOUS(a) || !PyArray_ISNOTSWAPPED(a) || !PyArray_ISALIGNED(a))
        return vm_py_refuse(PyExc_ValueError,
                            VM_EXPECTED("%s", "a C-contiguous, aligned array in native byte order", ""), name);
    if (vm_py_acquire(&self->lock, "set_tensor")) return NULL;
    vm_status s;
    Py_BEGIN_ALLOW_THREADS
    s = vm_weights_set(self->model, (size_t)(t - self->model->tensor), dtype, PyArray_DATA(a));
    Py_END_ALLOW_THREADS
    return vm_py_done(&self->lock, s);
}

static PyObject *model_get_tensor(Model *self, PyObject *name) {
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    const vm_tensor *t = text ? find_tensor(self, text) : NULL;
    if (!t || import_numpy()) return NULL;
    npy_intp dims[5];
    for (size_t i = 0; i < t->dims; i++) dims[i] = (npy_intp)t->shape[i];
    PyObject *a = PyArray_SimpleNew((int)t->dims, dims, NPY_FLOAT);
    if (!a || vm_py_acquire_to_read(&self->lock, "get_tensor")) {
        Py_XDECREF(a);
        return NULL;
    }
    vm_status s = vm_weights_get(self->model, (size_t)(t - self->model->tensor), PyArray_DATA((PyArrayObject *)a));
    vm_py_release(&self->lock);
    if (!s) return a;
    Py_DECREF(a);
    return vm_py_raise(s);
}

static PyObject *model_trim(Model *self, PyObject *Py_UNUSED(ignored)) {
    if (vm_py_acquire(&self->lock, "trim")) return NULL;
    vm_model_trim(self->model);
    return vm_py_done(&self->lock, VM_OK);
}

static PyMethodDef methods[] = {
    {"missing", (PyCFunction)model_missing, METH_NOARGS,
     "missing()\n--\n\nReturns the names of tensors that were never set."},
    {"rounded", (PyCFunction)model_rounded, METH_NOARGS,
     "rounded()\n--\n\nReturns the names of tensors with numbers that this model's dtype rounded."},
    {"set_tensor", (PyCFunction)model_set_tensor, METH_VARARGS,
     "set_tensor(name, array)\n--\n\nConverts array to the model's dtype and packs it; array may be freed "
     "afterwards."},
    {"get_tensor", (PyCFunction)model_get_tensor, METH_O,
     "get_tensor(name)\n--\n\nReturns a float32 copy of the stored tensor, exactly as set unless rounded. A "
     "causal 3D convolution stores only the slices that one frame meets; the others are zero here."},
    {"plan", VM_PY_KEYWORDS(vm_py_plan), METH_VARARGS | METH_KEYWORDS, vm_py_plan_doc},
    {"run", VM_PY_KEYWORDS(vm_py_run), METH_VARARGS | METH_KEYWORDS, vm_py_run_doc},
    {"reserve", (PyCFunction)vm_py_reserve, METH_O, vm_py_reserve_doc},
    {"blend", VM_PY_KEYWORDS(vm_py_blend), METH_VARARGS | METH_KEYWORDS, vm_py_blend_doc},
    {"trim", (PyCFunction)model_trim, METH_NOARGS, "trim()\n--\n\nFrees the arena."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {
    {"arch", (getter)model_arch, NULL, "The architecture, as a dict.", NULL},
    {"parts", (getter)model_parts, NULL, "'all', 'encoder' or 'decoder'.", NULL},
    {"tensors", (getter)model_tensors, NULL, "[(name, shape)], diffusers' names.", NULL},
    {"dtype", (getter)model_dtype, NULL, "'float32', 'float16' or 'bfloat16'.", NULL},
    {"precision", (getter)model_precision, NULL, "On the CPU: 'highest', 'high' or 'medium'.", NULL},
    {"reserved_bytes", (getter)model_reserved, NULL, "Bytes held from the system now.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot type_slots[] = {{Py_tp_doc,
                                    "Model(arch, parts='all', backend=None, dtype='float32', "
                                    "precision='highest')\n--\n\nAn AutoencoderKL with its packed "
                                    "weights. backend: a GPU's; dtype and precision are the CPU's."},
                                   {Py_tp_new, (void *)model_new},
                                   {Py_tp_dealloc, (void *)model_dealloc},
                                   {Py_tp_methods, methods},
                                   {Py_tp_getset, attributes},
                                   {0, NULL}};

PyType_Spec vm_py_model_type = {"vaemem._core.Model", sizeof(Model), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                type_slots};
