/* vaemem._core.Model: an architecture with its weights, planned and run. vaemem/vae.py is its face. */
#include "py.h"

typedef struct Model {
    PyObject_HEAD vm_model *model;
    PyThread_type_lock lock; /* held by whoever uses model; runs wait for each other */
} Model;

/* Waits without the GIL, in slices so that Ctrl-C is heard. -1 with an exception set. */
static int lock(Model *self) {
    if (!self->model) {
        PyErr_SetString(PyExc_ValueError, "model: not initialised");
        return -1;
    }
    for (;;) {
        PyLockStatus got;
        Py_BEGIN_ALLOW_THREADS got = PyThread_acquire_lock_timed(self->lock, 50000, 1);
        Py_END_ALLOW_THREADS if (got == PY_LOCK_ACQUIRED) return 0;
        if (PyErr_CheckSignals()) return -1;
    }
}

static void unlock(Model *self) { PyThread_release_lock(self->lock); }

static int parse_parts(const char *text, unsigned *parts) {
    *parts = !strcmp(text, "all") ? VM_ENCODER | VM_DECODER : !strcmp(text, "encoder") ? VM_ENCODER : VM_DECODER;
    if (*parts != VM_DECODER || !strcmp(text, "decoder")) return 0;
    PyErr_Format(PyExc_ValueError, "parts: want all, encoder or decoder, got '%s'", text);
    return -1;
}

static PyObject *model_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"arch", "parts", NULL};
    PyObject *dict;
    const char *parts_name = "all";
    unsigned parts;
    vm_arch arch;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|s", names, &dict, &parts_name)) return NULL;
    if (parse_parts(parts_name, &parts) || vm_py_arch_from_dict(dict, &arch)) return NULL;
    Model *self = (Model *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    vm_status s = VM_ENOMEM;
    if ((self->lock = PyThread_allocate_lock()))
        s = vm_model_new(&arch, parts, &self->model);
    else
        vm_fail(s, "memory: no lock could be made");
    if (s) {
        Py_DECREF(self);
        return vm_py_raise(s);
    }
    return (PyObject *)self;
}

static void model_dealloc(Model *self) {
    PyTypeObject *type = Py_TYPE(self);
    vm_model_free(self->model);
    if (self->lock) PyThread_free_lock(self->lock);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- weights ---- */

static PyObject *shape_of(const vm_tensor *t) {
    PyObject *shape = PyTuple_New((Py_ssize_t)t->dims);
    for (size_t i = 0; shape && i < t->dims; i++)
        PyTuple_SET_ITEM(shape, (Py_ssize_t)i, PyLong_FromSize_t(t->shape[i]));
    return shape;
}

static PyObject *model_tensors(Model *self, void *Py_UNUSED(closure)) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < self->model->tensors; i++) {
        const vm_tensor *t = &self->model->tensor[i];
        PyObject *pair = Py_BuildValue("(sN)", t->name, shape_of(t));
        if (!pair || PyList_Append(list, pair)) Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

static PyObject *model_arch(Model *self, void *Py_UNUSED(closure)) { return vm_py_arch_to_dict(&self->model->arch); }

static PyObject *model_parts(Model *self, void *Py_UNUSED(closure)) {
    const unsigned p = self->model->parts;
    return PyUnicode_FromString(p == VM_ENCODER ? "encoder" : p == VM_DECODER ? "decoder" : "all");
}

static PyObject *model_reserved(Model *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(vm_mem_usage(self->model->mem).reserved);
}

static PyObject *model_missing(Model *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < self->model->tensors; i++) {
        if (self->model->tensor[i].set) continue;
        PyObject *name = PyUnicode_FromString(self->model->tensor[i].name);
        if (!name || PyList_Append(list, name)) Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static const vm_tensor *find_tensor(Model *self, const char *name) {
    const vm_tensor *t = vm_weights_find(self->model, name);
    if (!t) PyErr_Format(PyExc_KeyError, "tensor: this model has no %s", name);
    return t;
}

/* float32, float16, or ml_dtypes' bfloat16 (a user type: known by its name). */
static int dtype_of(PyArrayObject *a, vm_dtype *dtype) {
    PyArray_Descr *d = PyArray_DESCR(a);
    *dtype = d->type_num == NPY_HALF ? VM_F16 : d->type_num == NPY_FLOAT ? VM_F32 : VM_BF16;
    const char *dot = strrchr(d->typeobj->tp_name, '.'), *name = dot ? dot + 1 : d->typeobj->tp_name;
    if (*dtype != VM_BF16 || (PyDataType_ELSIZE(d) == 2 && !strcmp(name, "bfloat16"))) return 0;
    PyErr_Format(PyExc_TypeError, "array: want float32, float16 or bfloat16, got %R", (PyObject *)d);
    return -1;
}

static PyObject *model_set_tensor(Model *self, PyObject *args) {
    const char *name;
    PyArrayObject *a;
    vm_dtype dtype;
    if (!PyArg_ParseTuple(args, "sO!", &name, &PyArray_Type, &a)) return NULL;
    const vm_tensor *t = find_tensor(self, name);
    if (!t || dtype_of(a, &dtype)) return NULL;
    bool same = (size_t)PyArray_NDIM(a) == t->dims;
    for (size_t i = 0; same && i < t->dims; i++) same = (size_t)PyArray_DIM(a, (int)i) == t->shape[i];
    if (!same) {
        PyObject *want = shape_of(t), *got = PyObject_GetAttrString((PyObject *)a, "shape");
        if (want && got) PyErr_Format(PyExc_ValueError, "%s: want shape %R, got %R", name, want, got);
        Py_XDECREF(want);
        Py_XDECREF(got);
        return NULL;
    }
    if (!PyArray_IS_C_CONTIGUOUS(a) || !PyArray_ISNOTSWAPPED(a) || !PyArray_ISALIGNED(a)) {
        PyErr_Format(PyExc_ValueError, "%s: want a C-contiguous, aligned array in native byte order", name);
        return NULL;
    }
    if (lock(self)) return NULL;
    Py_BEGIN_ALLOW_THREADS vm_weights_set(self->model, (size_t)(t - self->model->tensor), dtype, PyArray_DATA(a));
    Py_END_ALLOW_THREADS unlock(self);
    Py_RETURN_NONE;
}

static PyObject *model_get_tensor(Model *self, PyObject *name) {
    const char *text = PyUnicode_AsUTF8(name);
    const vm_tensor *t = text ? find_tensor(self, text) : NULL;
    if (!t) return NULL;
    npy_intp dims[4] = {(npy_intp)t->shape[0], (npy_intp)t->shape[1], (npy_intp)t->shape[2], (npy_intp)t->shape[3]};
    PyObject *a = PyArray_SimpleNew((int)t->dims, dims, NPY_FLOAT);
    if (!a || lock(self)) {
        Py_XDECREF(a);
        return NULL;
    }
    vm_weights_get(self->model, (size_t)(t - self->model->tensor), PyArray_DATA((PyArrayObject *)a));
    unlock(self);
    return a;
}

/* ---- plans and runs ---- */

static PyObject *bytes_dict(const size_t bytes[VM_CATEGORIES]) {
    return Py_BuildValue("{s:n, s:n, s:n, s:n}", "weights", (Py_ssize_t)bytes[VM_WEIGHTS], "activations",
                         (Py_ssize_t)bytes[VM_ACTIVATIONS], "scratch", (Py_ssize_t)bytes[VM_SCRATCH], "output",
                         (Py_ssize_t)bytes[VM_OUTPUT]);
}

/* peak, reserved: planned or measured; steps carry the same kind. */
static PyObject *summary(const vm_model *m, const vm_plan *plan, bool measured, const size_t *peak, size_t reserved) {
    PyObject *steps = PyList_New(0);
    for (size_t i = 0; steps && i < plan->steps; i++) {
        const vm_step *s = &plan->step[i];
        PyObject *row = Py_BuildValue("{s:s, s:N, s:d, s:d}", "name", m->graph[plan->op].node[i].name, "live",
                                      bytes_dict(measured ? s->measured : s->live), "flops",
                                      vm_pass_flops(&s->pass) * (double)plan->batch, "seconds", s->seconds);
        if (!row || PyList_Append(steps, row)) Py_CLEAR(steps);
        Py_XDECREF(row);
    }
    if (!steps) return NULL;
    return Py_BuildValue("{s:N, s:n, s:n, s:s, s:i, s:N}", "peak", bytes_dict(peak), "reserved", (Py_ssize_t)reserved,
                         "arena", (Py_ssize_t)plan->arena_bytes, "backend", plan->backend->name, "threads",
                         (int)plan->threads, "steps", steps);
}

typedef struct request {
    vm_op op;
    const vm_backend *backend;
    unsigned threads;
    vm_format pixels;
    bool scaled;
} request;

static int parse_request(request *r, const char *op, const char *pixels, int threads, int scaled, const char *backend) {
    *r = (request){.op = !strcmp(op, "encode") ? VM_ENCODE : VM_DECODE, .threads = (unsigned)threads, .scaled = scaled};
    if (r->op == VM_DECODE && strcmp(op, "decode")) {
        PyErr_Format(PyExc_ValueError, "op: want encode or decode, got '%s'", op);
        return -1;
    }
    r->pixels = !strcmp(pixels, "float") ? VM_F32_NCHW : VM_U8_NHWC;
    if (r->pixels == VM_U8_NHWC && strcmp(pixels, "uint8")) {
        PyErr_Format(PyExc_ValueError, "pixels: want float or uint8, got '%s'", pixels);
        return -1;
    }
    if (threads < 1 || threads > 1024) {
        PyErr_Format(PyExc_ValueError, "threads: want 1 to 1024, got %d", threads);
        return -1;
    }
    return (r->backend = vm_py_backend(backend)) ? 0 : -1;
}

static PyObject *model_plan(Model *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"op",      "height", "width",   "batch",      "pixels",
                            "threads", "scaled", "backend", "own_output", NULL};
    const char *op, *pixels = "float", *backend = NULL;
    Py_ssize_t height, width, batch = 1;
    int threads = 1, scaled = 0, own_output = 1;
    request r;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "snn|nsipzp", names, &op, &height, &width, &batch, &pixels, &threads,
                                     &scaled, &backend, &own_output))
        return NULL;
    if (parse_request(&r, op, pixels, threads, scaled, backend)) return NULL;
    if (height < 0 || width < 0 || batch < 0) {
        PyErr_Format(PyExc_ValueError, "%s: want a positive number, got %zd",
                     height < 0  ? "height"
                     : width < 0 ? "width"
                                 : "batch",
                     height < 0  ? height
                     : width < 0 ? width
                                 : batch);
        return NULL;
    }
    if (lock(self)) return NULL;
    vm_plan *plan;
    vm_status s = vm_plan_new(self->model, r.op, r.backend, r.threads, (size_t)height, (size_t)width, (size_t)batch,
                              r.pixels, own_output, r.scaled, &plan);
    PyObject *result = s ? vm_py_raise(s) : summary(self->model, plan, false, plan->peak, plan->reserved);
    vm_plan_free(self->model, plan);
    unlock(self);
    return result;
}

/* An output block that outlives the run: the array's base. */
typedef struct block {
    vm_mem *mem;
    void *data;
    size_t bytes;
} block;

static const char block_name[] = "vaemem.output";

static void free_block(PyObject *capsule) {
    block *b = PyCapsule_GetPointer(capsule, block_name);
    vm_mem_unreserve(b->mem, b->data, b->bytes);
    vm_mem_release(b->mem);
    PyMem_Free(b);
}

/* A new array over data, which it owns from then on; on failure data is still the caller's. */
static PyObject *own(vm_mem *mem, void *data, size_t bytes, const npy_intp dims[4], int type) {
    block *b = PyMem_Malloc(sizeof *b);
    PyObject *array = b ? PyArray_SimpleNewFromData(4, (npy_intp *)dims, type, data) : PyErr_NoMemory();
    PyObject *capsule = array ? PyCapsule_New(b, block_name, free_block) : NULL;
    if (!capsule) {
        Py_XDECREF(array);
        PyMem_Free(b);
        return NULL;
    }
    *b = (block){vm_mem_retain(mem), data, bytes};
    PyArray_SetBaseObject((PyArrayObject *)array, capsule); /* cannot fail: the array is new and has no base */
    return array;
}

typedef struct polling {
    PyThreadState *thread;
    PyObject *callback; /* or NULL */
} polling;

static bool poll(void *context, size_t done, size_t total) {
    polling *p = context;
    PyEval_RestoreThread(p->thread);
    bool stop = PyErr_CheckSignals() != 0;
    if (!stop && p->callback) {
        PyObject *r = PyObject_CallFunction(p->callback, "nn", (Py_ssize_t)done, (Py_ssize_t)total);
        stop = !r;
        Py_XDECREF(r);
    }
    p->thread = PyEval_SaveThread();
    return stop;
}

static int check_pixels(PyArrayObject *a, const char *what, const npy_intp dims[4], int type) {
    bool same =
        PyArray_NDIM(a) == 4 && PyArray_TYPE(a) == type && PyArray_IS_C_CONTIGUOUS(a) && PyArray_ISBEHAVED_RO(a);
    for (int i = 0; same && i < 4; i++) same = PyArray_DIM(a, i) == dims[i];
    if (same) return 0;
    PyErr_Format(PyExc_ValueError, "%s: want a C-contiguous %s array of shape (%zd, %zd, %zd, %zd)", what,
                 type == NPY_FLOAT ? "float32" : "uint8", dims[0], dims[1], dims[2], dims[3]);
    return -1;
}

typedef struct io {
    PyArrayObject *in, *out; /* out: borrowed from the caller or NULL */
    npy_intp out_dims[4];
    int out_type;
    size_t height, width, batch;
} io;

/* Shapes of both sides from the input's. */
static int describe(const vm_model *m, const request *r, io *x) {
    const npy_intp *d = PyArray_DIMS(x->in);
    const npy_intp factor = (npy_intp)vm_arch_factor(&m->arch), latent = (npy_intp)m->arch.latent_channels;
    if (PyArray_NDIM(x->in) != 4) {
        PyErr_Format(PyExc_ValueError, "input: want 4 dimensions, got %d", PyArray_NDIM(x->in));
        return -1;
    }
    x->batch = (size_t)d[0];
    x->out_type = NPY_FLOAT;
    if (r->op == VM_ENCODE) {
        const bool bytes = r->pixels == VM_U8_NHWC;
        const npy_intp h = bytes ? d[1] : d[2], w = bytes ? d[2] : d[3], c = (npy_intp)m->arch.in_channels;
        x->height = (size_t)h;
        x->width = (size_t)w;
        memcpy(x->out_dims, (npy_intp[]){d[0], 2 * latent, h / factor, w / factor}, sizeof x->out_dims);
        return bytes ? check_pixels(x->in, "image", (npy_intp[]){d[0], h, w, c}, NPY_UINT8)
                     : check_pixels(x->in, "image", (npy_intp[]){d[0], c, h, w}, NPY_FLOAT);
    }
    if (d[2] > NPY_MAX_INTP / factor || d[3] > NPY_MAX_INTP / factor) {
        PyErr_SetString(PyExc_OverflowError, "latent: its image's size overflows");
        return -1;
    }
    x->height = (size_t)(d[2] * factor);
    x->width = (size_t)(d[3] * factor);
    const npy_intp h = d[2] * factor, w = d[3] * factor, c = (npy_intp)m->arch.out_channels;
    if (r->pixels == VM_U8_NHWC) {
        x->out_type = NPY_UINT8;
        memcpy(x->out_dims, (npy_intp[]){d[0], h, w, c}, sizeof x->out_dims);
    } else
        memcpy(x->out_dims, (npy_intp[]){d[0], c, h, w}, sizeof x->out_dims);
    return check_pixels(x->in, "latent", (npy_intp[]){d[0], latent, d[2], d[3]}, NPY_FLOAT);
}

/* With the lock held: plan, run, and hand the output over. */
static PyObject *run_locked(Model *self, const request *r, io *x, PyObject *callback, int check) {
    vm_model *m = self->model;
    vm_plan *plan;
    void *data = NULL;
    PyObject *result = NULL;
    vm_status s = vm_plan_new(m, r->op, r->backend, r->threads, x->height, x->width, x->batch, r->pixels, !x->out,
                              r->scaled, &plan);
    if (s) return vm_py_raise(s);
    const size_t bytes = plan->out_bytes * plan->batch;
    vm_mem_reset_peak(m->mem);
    /* held for outputs that earlier runs handed over: not this run's */
    const size_t foreign =
        vm_mem_usage(m->mem).reserved - m->arena_bytes - vm_mem_usage(m->mem).live[VM_WEIGHTS] - plan->plan_bytes;
    size_t reserved = 0;
    polling p = {NULL, callback == Py_None ? NULL : callback};
    vm_run run = {.in = PyArray_DATA(x->in), .poll = poll, .poll_context = &p, .check = check};
    if (x->out)
        run.out = PyArray_DATA(x->out);
    else if (!(s = vm_mem_alloc(m->mem, VM_OUTPUT, bytes, &data)))
        run.out = data;
    if (!s) {
        p.thread = PyEval_SaveThread();
        s = vm_plan_run(m, plan, &run);
        PyEval_RestoreThread(p.thread);
        reserved = vm_mem_usage(m->mem).reserved - foreign + plan->pool_bytes;
    }
    if (data) vm_mem_unuse(m->mem, VM_OUTPUT, bytes);
    if (s) {
        vm_py_raise(s);
    } else {
        vm_usage usage = vm_mem_usage(m->mem);
        PyObject *array = data ? own(m->mem, data, bytes, x->out_dims, x->out_type) : Py_NewRef((PyObject *)x->out);
        if (array) {
            data = NULL;
            PyObject *record = summary(m, plan, true, usage.peak, reserved);
            result = record ? Py_BuildValue("(NN)", array, record) : NULL;
            if (!record) Py_DECREF(array);
        }
    }
    if (data) vm_mem_unreserve(m->mem, data, bytes);
    const size_t rows = plan->rows;
    vm_plan_free(m, plan);
    if (result && p.callback) {
        PyObject *done = PyObject_CallFunction(p.callback, "nn", (Py_ssize_t)rows, (Py_ssize_t)rows);
        if (!done) Py_CLEAR(result);
        Py_XDECREF(done);
    }
    return result;
}

static PyObject *model_run(Model *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"op", "input", "out", "pixels", "threads", "scaled", "backend", "poll", "check", NULL};
    const char *op, *pixels = "float", *backend = NULL;
    PyObject *out = Py_None, *callback = Py_None;
    int threads = 1, scaled = 0, check = 0;
    io x = {0};
    request r;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO!|OsipzOp", names, &op, &PyArray_Type, &x.in, &out, &pixels,
                                     &threads, &scaled, &backend, &callback, &check))
        return NULL;
    if (parse_request(&r, op, pixels, threads, scaled, backend) || describe(self->model, &r, &x)) return NULL;
    if (out != Py_None) {
        if (!PyArray_Check(out))
            return PyErr_Format(PyExc_TypeError, "out: want an array, got %s", Py_TYPE(out)->tp_name);
        x.out = (PyArrayObject *)out;
        if (check_pixels(x.out, "out", x.out_dims, x.out_type)) return NULL;
        if (!PyArray_ISWRITEABLE(x.out)) return PyErr_Format(PyExc_ValueError, "out: want a writable array");
    }
    if (callback != Py_None && !PyCallable_Check(callback))
        return PyErr_Format(PyExc_TypeError, "poll: want a callable, got %s", Py_TYPE(callback)->tp_name);
    if (lock(self)) return NULL;
    PyObject *result = run_locked(self, &r, &x, callback, check);
    unlock(self);
    return result;
}

static PyObject *model_trim(Model *self, PyObject *Py_UNUSED(ignored)) {
    if (lock(self)) return NULL;
    vm_model_trim(self->model);
    unlock(self);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"missing", (PyCFunction)model_missing, METH_NOARGS, "missing()\n--\n\nNames of tensors that were never set."},
    {"set_tensor", (PyCFunction)model_set_tensor, METH_VARARGS,
     "set_tensor(name, array)\n--\n\nConverts to float32 and packs; array may be freed after."},
    {"get_tensor", (PyCFunction)model_get_tensor, METH_O,
     "get_tensor(name)\n--\n\nA float32 copy, bit for bit what was set."},
    {"plan", (PyCFunction)(void (*)(void))model_plan, METH_VARARGS | METH_KEYWORDS,
     "plan(op, height, width, batch=1, pixels='float', threads=1, scaled=False, backend=None, own_output=True)\n--\n\n"
     "What a run would take, as a dict."},
    {"run", (PyCFunction)(void (*)(void))model_run, METH_VARARGS | METH_KEYWORDS,
     "run(op, input, out=None, pixels='float', threads=1, scaled=False, backend=None, poll=None, check=False)\n--\n\n"
     "(output, what it took as a dict). poll(rows_done, rows_total) is called about 20 times a second and once at the "
     "end."},
    {"trim", (PyCFunction)model_trim, METH_NOARGS, "trim()\n--\n\nGives the arena back to the system."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {
    {"arch", (getter)model_arch, NULL, "The architecture, as a dict.", NULL},
    {"parts", (getter)model_parts, NULL, "'all', 'encoder' or 'decoder'.", NULL},
    {"tensors", (getter)model_tensors, NULL, "[(name, shape)], diffusers' names.", NULL},
    {"reserved_bytes", (getter)model_reserved, NULL, "Bytes held from the system now.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, "Model(arch, parts='all')\n--\n\nAn AutoencoderKL with its packed weights."},
    {Py_tp_new, (void *)model_new},
    {Py_tp_dealloc, (void *)model_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL}};

static PyType_Spec type_spec = {"vaemem._core.Model", sizeof(Model), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                type_slots};

int vm_py_add_model(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &type_spec, NULL);
    if (!type) return -1;
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result;
}
