/* vaemem._core.Model.plan, run and run_at. */
#include "py_model.h"

static PyObject *bytes_dict(const size_t bytes[VM_CATEGORIES]) {
    return Py_BuildValue("{s:n, s:n, s:n, s:n, s:n}", "weights", (Py_ssize_t)bytes[VM_WEIGHTS], "activations",
                         (Py_ssize_t)bytes[VM_ACTIVATIONS], "scratch", (Py_ssize_t)bytes[VM_SCRATCH], "workspace",
                         (Py_ssize_t)bytes[VM_WORKSPACE], "output", (Py_ssize_t)bytes[VM_OUTPUT]);
}

/* What the plan says, or where there is a run what it took. */
typedef struct told {
    const vm_plan *plan;
    const vm_run *run;
} told;

static PyObject *step_item(const void *context, size_t i) {
    const told *t = context;
    const vm_step *s = &t->plan->step[i];
    const vm_chain *c = t->plan->chain;
    while (c->last < (int)i) c++;
    return Py_BuildValue("{s:s, s:N, s:d, s:d, s:O}", "name", t->plan->graph->node[i].name, "live",
                         bytes_dict(t->run ? c->measured : c->live), "flops", s->flops * (double)t->plan->ask.batch,
                         "seconds", s->seconds, "streamed", s->streamed ? Py_True : Py_False);
}

static PyObject *summary(const vm_plan *plan, const vm_run *run) {
    PyObject *steps = vm_py_list(plan->steps, step_item, &(told){plan, run});
    if (!steps) return NULL;
    return Py_BuildValue("{s:N, s:n, s:n, s:s, s:i, s:d, s:N, s:N}", "peak", bytes_dict(run ? run->peak : plan->peak),
                         "reserved", (Py_ssize_t)(run ? run->reserved : plan->reserved), "arena",
                         (Py_ssize_t)(plan->arena_bytes + (run ? run->reserved - plan->reserved : 0)), "backend",
                         plan->ask.backend->name, "threads", (int)plan->ask.limits.threads, "work", plan->work, "steps",
                         steps, "overflow", PyBool_FromLong(run && run->overflow));
}

static const struct {
    const char *name;
    vm_format format;
} formats[] = {{"float", VM_F32_NCHW},
               {"uint8", VM_U8_NHWC},
               {"float32", VM_F32_NCHW},
               {"float16", VM_F16_NCHW},
               {"bfloat16", VM_BF16_NCHW}};

static bool on_host(const vm_model *m) { return m->backend->device->addressable; }

static int parse_format(const char *name, const char *what, const vm_model *m, vm_format *out) {
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (!strcmp(name, formats[i].name)) *out = formats[i].format;
    const bool half = *out == VM_F16_NCHW || *out == VM_BF16_NCHW;
    if (*out != VM_ROWS && !(half && on_host(m))) return 0;
    PyErr_Format(PyExc_ValueError, "%s: want float or uint8%s, got '%s'", what,
                 on_host(m) ? "" : ", float32, float16 or bfloat16", name);
    return -1;
}

/* What all three methods ask alike. pixels: the image's format; latents: the latents' (NULL: float). */
static int parse_request(Model *self, vm_request *r, const char *op, const char *pixels, const char *latents,
                         unsigned threads, const char *backend) {
    vm_model *m = self->model;
    vm_format image = VM_ROWS, latent = VM_ROWS;
    r->op = !strcmp(op, "encode") ? VM_ENCODE : VM_DECODE;
    if (r->op == VM_DECODE && strcmp(op, "decode")) {
        PyErr_Format(PyExc_ValueError, "op: want encode or decode, got '%s'", op);
        return -1;
    }
    if (parse_format(pixels, "pixels", m, &image) || parse_format(latents ? latents : "float", "latents", m, &latent))
        return -1;
    r->in = r->op == VM_ENCODE ? image : latent;
    r->out = r->op == VM_ENCODE ? latent : image;
    r->limits.threads = on_host(m) ? threads : 1;
    if (!on_host(m) && backend && *backend) {
        PyErr_Format(PyExc_ValueError, "backend: this model lives on %s, got %s", m->backend->name, backend);
        return -1;
    }
    return (r->backend = on_host(m) ? vm_py_backend(backend, m->backend->dtype, m->backend->precision) : m->backend)
               ? 0
               : -1;
}

/* Sizes that were parsed as signed. */
static int check_sizes(const vm_request *r) {
    const size_t value[] = {r->height, r->width, r->batch, r->memory_limit};
    static const char *const name[] = {"height", "width", "batch", "memory_limit"};
    for (int i = 0; i < 4; i++)
        if (value[i] > PY_SSIZE_T_MAX) {
            PyErr_Format(PyExc_ValueError, "%s: want a positive number, got %zd", name[i], (Py_ssize_t)value[i]);
            return -1;
        }
    return 0;
}

/* Raises what planning refused; a limit that is too low as ValueError with the attribute smallest, in bytes. */
static PyObject *raise_plan(vm_status s, const vm_plan *plan) {
    if (s != VM_ELIMIT) return vm_py_raise(s);
    PyObject *error = PyObject_CallFunction(PyExc_ValueError, "s", vm_error());
    PyObject *smallest = error ? PyLong_FromSize_t(plan->reserved) : NULL;
    if (smallest && !PyObject_SetAttrString(error, "smallest", smallest)) PyErr_SetObject(PyExc_ValueError, error);
    Py_XDECREF(smallest);
    Py_XDECREF(error);
    return NULL;
}

const char vm_py_plan_doc[] =
    "plan(op, height, width, batch=1, pixels='float', threads=1, scaled=False, backend=None, own_output=True, "
    "host_arrays=True, latents='float', memory_limit=0)\n--\n\n"
    "What a run would take, as a dict. host_arrays: the user's arrays are in host memory, not in the device's.";

PyObject *vm_py_plan(Model *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"op",      "height",     "width",       "batch",   "pixels",       "threads", "scaled",
                            "backend", "own_output", "host_arrays", "latents", "memory_limit", NULL};
    const char *op, *pixels = "float", *latents = NULL, *backend = NULL;
    unsigned threads = 1;
    int scaled = 0, own_output = 1, host_arrays = 1;
    vm_request r = {.batch = 1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "snn|nsO&pzppzn", names, &op, &r.height, &r.width, &r.batch, &pixels,
                                     vm_py_to_threads, &threads, &scaled, &backend, &own_output, &host_arrays, &latents,
                                     &r.memory_limit))
        return NULL;
    if (parse_request(self, &r, op, pixels, latents, threads, backend) || check_sizes(&r)) return NULL;
    r.host_arrays = host_arrays;
    r.own_output = own_output;
    r.scaled = scaled;
    vm_plan *plan;
    vm_status s;
    Py_BEGIN_ALLOW_THREADS
    s = vm_plan_new(self->model, &r, &plan);
    Py_END_ALLOW_THREADS
    PyObject *result = s ? raise_plan(s, plan) : summary(plan, NULL);
    vm_plan_free(self->model, plan);
    return result;
}

/* An output block that outlives the run: an array's base, or what a device's array keeps. */
typedef struct block {
    vm_mem *mem;
    PyObject *backend; /* whose memory it may be */
    void *data;
    size_t bytes;
} block;

static const char block_name[] = "vaemem.output";

static void free_block(PyObject *capsule) {
    block *b = PyCapsule_GetPointer(capsule, block_name);
    vm_mem_unreserve(b->mem, b->data, b->bytes);
    vm_mem_release(b->mem);
    Py_DECREF(b->backend);
    PyMem_Free(b);
}

/* A capsule that owns a block from then on; on failure it is still the caller's. */
static PyObject *own(Model *self, vm_mem *mem, void *data, size_t bytes) {
    block *b = PyMem_Malloc(sizeof *b);
    PyObject *capsule = b ? PyCapsule_New(b, block_name, free_block) : PyErr_NoMemory();
    if (!capsule) {
        PyMem_Free(b);
        return NULL;
    }
    *b = (block){vm_mem_retain(mem), Py_NewRef(self->backend), data, bytes};
    return capsule;
}

const char vm_py_reserve_doc[] =
    "reserve(bytes)\n--\n\n(address, owner): memory of the model's device, given back when owner dies.";

PyObject *vm_py_reserve(Model *self, PyObject *size) {
    const size_t bytes = PyLong_AsSize_t(size);
    vm_mem *mem = self->model->mem;
    void *data;
    vm_status s;
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = vm_mem_reserve(mem, bytes, &data);
    Py_END_ALLOW_THREADS
    if (s) return vm_py_raise(s);
    PyObject *owner = own(self, mem, data, bytes);
    if (owner) return Py_BuildValue("(KN)", (unsigned long long)(uintptr_t)data, owner);
    vm_mem_unreserve(mem, data, bytes);
    return NULL;
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

/* ---- a run ---- */

/* A run as Python asks for it, and what it leaves. */
typedef struct job {
    vm_run run;
    PyObject *owner;    /* new reference: the capsule of an output that the run took */
    PyObject *record;   /* new reference */
    PyObject *callback; /* or NULL */
} job;

/* With the lock held: plan and run. -1 with an exception set and nothing kept. */
static int run_locked(Model *self, const vm_request *r, job *j) {
    vm_model *m = self->model;
    vm_run *run = &j->run;
    polling p = {NULL, j->callback};
    vm_plan *plan;
    vm_status s;
    run->poll = poll;
    run->poll_context = &p;
    p.thread = PyEval_SaveThread();
    s = vm_plan_new(m, r, &plan);
    if (!s) s = vm_plan_run(m, plan, run);
    PyEval_RestoreThread(p.thread);
    if (s)
        raise_plan(s, plan);
    else if (!run->out_mem || (j->owner = own(self, run->out_mem, run->out, run->out_bytes)))
        j->record = summary(plan, run);
    else
        vm_mem_unreserve(run->out_mem, run->out, run->out_bytes);
    const size_t rows = s ? 0 : plan->rows;
    vm_plan_free(m, plan);
    if (j->record && j->callback) {
        PyObject *done = PyObject_CallFunction(j->callback, "nn", (Py_ssize_t)rows, (Py_ssize_t)rows);
        if (!done) Py_CLEAR(j->record);
        Py_XDECREF(done);
    }
    if (!j->record) Py_CLEAR(j->owner);
    return j->record ? 0 : -1;
}

/* For PyArg_ParseTuple's O&: a callable, or NULL where it is None. */
static int to_callback(PyObject *object, void *out) {
    *(PyObject **)out = object == Py_None ? NULL : object;
    if (object == Py_None || PyCallable_Check(object)) return 1;
    PyErr_Format(PyExc_TypeError, "poll: want a callable, got %s", Py_TYPE(object)->tp_name);
    return 0;
}

/* ---- on NumPy arrays ---- */

static int type_of(vm_format format) { return format == VM_U8_NHWC ? NPY_UINT8 : NPY_FLOAT; }

static bool has_shape(PyArrayObject *a, const npy_intp dims[4]) {
    return PyArray_NDIM(a) == 4 && PyArray_CompareLists(PyArray_DIMS(a), dims, 4);
}

static int check_output(PyArrayObject *a, const npy_intp dims[4], vm_format format) {
    if (has_shape(a, dims) && PyArray_TYPE(a) == type_of(format) && PyArray_ISCARRAY(a)) return 0;
    PyErr_Format(PyExc_ValueError, "out: want a writable, C-contiguous, aligned %s array of shape (%zd, %zd, %zd, %zd)",
                 format == VM_U8_NHWC ? "uint8" : "float32", dims[0], dims[1], dims[2], dims[3]);
    return -1;
}

/* The input as the run reads it, a new reference. A CPU reads nearly every type at any strides. What it does not know,
 * and what is sent to a device, is packed first. */
static PyArrayObject *open_input(const vm_model *m, PyArrayObject *a, vm_format format, vm_numbers *how) {
    const int type = PyArray_TYPE(a);
    const bool bytes = format == VM_U8_NHWC, real = PyTypeNum_ISINTEGER(type) || PyTypeNum_ISFLOAT(type);
    const bool known = bytes ? type == NPY_UINT8 : real || vm_py_is_bfloat16(a);
    if (bytes && !known) return (void *)PyErr_Format(PyExc_ValueError, "image: want uint8 with pixels='uint8'");
    if (known && on_host(m))
        Py_INCREF(a);
    else if (!(a = (PyArrayObject *)PyArray_FROMANY((PyObject *)a, type_of(format), 4, 4,
                                                    NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST)))
        return NULL;
    const npy_intp *stride = PyArray_STRIDES(a);
    *how = (vm_numbers){.data = PyArray_DATA(a),
                        .kind = vm_py_is_bfloat16(a) ? 'b' : PyArray_DESCR(a)->kind,
                        .size = (size_t)PyArray_ITEMSIZE(a),
                        .swapped = PyArray_ISBYTESWAPPED(a),
                        .item = stride[0],
                        .channel = stride[bytes ? 3 : 1],
                        .row = stride[bytes ? 1 : 2],
                        .pixel = stride[bytes ? 2 : 3]};
    return a;
}

static void shape_of(vm_format format, npy_intp n, npy_intp c, npy_intp h, npy_intp w, npy_intp dims[4]) {
    const npy_intp planes[4] = {n, c, h, w}, pixels[4] = {n, h, w, c};
    memcpy(dims, format == VM_U8_NHWC ? pixels : planes, sizeof planes);
}

/* Sizes of the image and of the output, from the input's. */
static int describe(const vm_model *m, vm_request *r, PyArrayObject *in, npy_intp out_dims[4]) {
    if (PyArray_NDIM(in) != 4) {
        PyErr_Format(PyExc_ValueError, "input: want 4 dimensions, got %d", PyArray_NDIM(in));
        return -1;
    }
    const bool encode = r->op == VM_ENCODE, bytes = r->in == VM_U8_NHWC;
    const npy_intp factor = (npy_intp)vm_arch_factor(&m->arch), latent = (npy_intp)m->arch.latent_channels;
    const npy_intp *d = PyArray_DIMS(in), n = d[0], h = d[bytes ? 1 : 2], w = d[bytes ? 2 : 3];
    if (!encode && VM_MAX(h, w) > NPY_MAX_INTP / factor) {
        PyErr_SetString(PyExc_OverflowError, "latent: its image's size overflows");
        return -1;
    }
    npy_intp in_dims[4];
    shape_of(r->in, n, encode ? (npy_intp)m->arch.in_channels : latent, h, w, in_dims);
    shape_of(r->out, n, (npy_intp)(encode ? vm_arch_encoded(&m->arch) : m->arch.out_channels),
             encode ? h / factor : h * factor, encode ? w / factor : w * factor, out_dims);
    r->batch = (size_t)n;
    r->height = (size_t)(encode ? h : h * factor);
    r->width = (size_t)(encode ? w : w * factor);
    if (has_shape(in, in_dims)) return 0;
    PyErr_Format(PyExc_ValueError, "%s: want an array of shape (%zd, %zd, %zd, %zd)", encode ? "image" : "latent",
                 in_dims[0], in_dims[1], in_dims[2], in_dims[3]);
    return -1;
}

const char vm_py_run_doc[] =
    "run(op, input, out=None, pixels='float', threads=1, scaled=False, backend=None, poll=None, check=False, "
    "scale=1.0, replay=False, memory_limit=0, unclamped=False)\n--\n\n"
    "(output, what it took as a dict), NumPy arrays. poll(rows_done, rows_total) is called about 20 times a second and "
    "once at the end. unclamped: log-variances may leave [-30, 20].";

PyObject *vm_py_run(Model *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"op",   "input", "out",   "pixels", "threads",      "scaled",    "backend",
                            "poll", "check", "scale", "replay", "memory_limit", "unclamped", NULL};
    const char *op, *pixels = "float", *backend = NULL;
    PyArrayObject *in;
    PyObject *out = Py_None, *callback = NULL;
    npy_intp out_dims[4];
    unsigned threads = 1;
    int scaled = 0, check = 0, replay = 0, unclamped = 0;
    vm_request r = {.scale = 1, .host_arrays = true};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO!|OsO&pzO&pfpnp", names, &op, &PyArray_Type, &in, &out, &pixels,
                                     vm_py_to_threads, &threads, &scaled, &backend, to_callback, &callback, &check,
                                     &r.scale, &replay, &r.memory_limit, &unclamped))
        return NULL;
    if (strcmp(pixels, "float") && strcmp(pixels, "uint8"))
        return PyErr_Format(PyExc_ValueError, "pixels: want float or uint8, got '%s'", pixels);
    if (parse_request(self, &r, op, pixels, NULL, threads, backend) || describe(self->model, &r, in, out_dims) ||
        check_sizes(&r))
        return NULL;
    PyArrayObject *given = NULL;
    if (out != Py_None) {
        if (!PyArray_Check(out))
            return PyErr_Format(PyExc_TypeError, "out: want an array, got %s", Py_TYPE(out)->tp_name);
        given = (PyArrayObject *)out;
        if (check_output(given, out_dims, r.out)) return NULL;
    }
    vm_numbers how;
    PyArrayObject *input = open_input(self->model, in, r.in, &how);
    if (!input || vm_py_acquire(&self->lock, op)) {
        Py_XDECREF(input);
        return NULL;
    }
    r.own_output = !given;
    r.scaled = scaled;
    r.unclamped = unclamped;
    job j = {.run = {.in = how,
                     .out = given ? PyArray_DATA(given) : NULL,
                     .wait = true,
                     .replay = replay && !on_host(self->model),
                     .check = check},
             .callback = callback};
    const int failed = run_locked(self, &r, &j);
    vm_py_release(&self->lock);
    Py_DECREF(input);
    if (failed) return NULL;
    PyObject *array = given ? Py_NewRef(out) : PyArray_SimpleNewFromData(4, out_dims, type_of(r.out), j.run.out);
    if (array && j.owner)
        PyArray_SetBaseObject((PyArrayObject *)array, j.owner); /* steals; cannot fail: a new array has no base */
    else
        Py_XDECREF(j.owner);
    return Py_BuildValue("(NN)", array, j.record);
}

/* ---- on a device's own memory ---- */

const char vm_py_run_at_doc[] =
    "run_at(op, input, out, height, width, batch=1, pixels='float32', latents='float32', scaled=False, stream=0, "
    "wait=True, poll=None, scale=1.0, replay=False, own_output=False, memory_limit=0, unclamped=False, "
    "strides=(0, 0, 0, 0))\n--\n\n"
    "(address of the output, its owner or None, what it took as a dict), for a model on a device. input, out: "
    "addresses there; out 0: taken by the run. own_output: out was taken for this run and counts as its output. "
    "strides: where the input is a part of an image, its bytes from item, channel, row and pixel to the next.";

PyObject *vm_py_run_at(Model *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"op",         "input",        "out",       "height",  "width", "batch", "pixels",
                            "latents",    "scaled",       "stream",    "wait",    "poll",  "scale", "replay",
                            "own_output", "memory_limit", "unclamped", "strides", NULL};
    const char *op, *pixels = "float32", *latents = NULL;
    unsigned long long in, out, stream = 0;
    PyObject *callback = NULL;
    int scaled = 0, wait = 1, replay = 0, own_output = 0, unclamped = 0;
    Py_ssize_t item = 0, channel = 0, row = 0, pixel = 0;
    vm_request r = {.batch = 1, .scale = 1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sKKnn|nszpKpO&fppnp(nnnn)", names, &op, &in, &out, &r.height,
                                     &r.width, &r.batch, &pixels, &latents, &scaled, &stream, &wait, to_callback,
                                     &callback, &r.scale, &replay, &own_output, &r.memory_limit, &unclamped, &item,
                                     &channel, &row, &pixel))
        return NULL;
    if (on_host(self->model))
        return PyErr_Format(PyExc_ValueError, "run_at: want a model on a device, got one on the CPU");
    if (parse_request(self, &r, op, pixels, latents, 1, NULL) || check_sizes(&r) || vm_py_acquire(&self->lock, op))
        return NULL;
    r.scaled = scaled;
    r.own_output = own_output || !out;
    r.unclamped = unclamped;
    job j = {
        .run =
            {.in = {.data = (const void *)(uintptr_t)in, .item = item, .channel = channel, .row = row, .pixel = pixel},
             .out = (void *)(uintptr_t)out,
             .stream = (void *)(uintptr_t)stream,
             .wait = wait,
             .replay = replay},
        .callback = callback};
    const int failed = run_locked(self, &r, &j);
    vm_py_release(&self->lock);
    if (failed) return NULL;
    PyObject *owner = j.owner ? j.owner : Py_NewRef(Py_None);
    return Py_BuildValue("(KNN)", (unsigned long long)(uintptr_t)j.run.out, owner, j.record);
}

const char vm_py_blend_doc[] =
    "blend(stream, op, format, **fields)\n--\n\n"
    "Blends a tile into the image that it is from. op: encode or decode, whose numbers are clamped. fields: all others "
    "of kernels.h's vm_blend_args, addresses as integers. stream: of the model's device; None: all is in host memory.";

PyObject *vm_py_blend(Model *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"stream",  "op",  "format", "tile", "lower", "right",  "y",      "batch",
                            "y_c",     "h",   "w",      "step", "down",  "across", "border", "lower_w",
                            "right_h", "y_h", "y_w",    "top",  "left",  "cosine", NULL};
    const vm_backend *b = self->model->backend;
    PyObject *stream;
    const char *op, *format;
    unsigned long long tile, lower, right, y, number = 0;
    vm_format y_format = VM_ROWS;
    vm_blend_args a;
    vm_status s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OssKKKKIIIIIIIIIIIIIII:blend", names, &stream, &op, &format, &tile,
                                     &lower, &right, &y, &a.batch, &a.y_c, &a.h, &a.w, &a.step, &a.down, &a.across,
                                     &a.border, &a.lower_w, &a.right_h, &a.y_h, &a.y_w, &a.top, &a.left, &a.cosine) ||
        parse_format(format, "format", self->model, &y_format))
        return NULL;
    if (stream != Py_None && (number = PyLong_AsUnsignedLongLong(stream), PyErr_Occurred())) return NULL;
    const vm_device *d = stream == Py_None ? &vm_host : b->device;
    a.tile = (const float *)(uintptr_t)tile;
    a.lower = (float *)(uintptr_t)lower;
    a.right = (float *)(uintptr_t)right;
    a.y = (void *)(uintptr_t)y;
    a.format = y_format;
    const vm_graph *graph = &self->model->graph[strcmp(op, "encode") ? VM_DECODE : VM_ENCODE];
    a.clamp = graph->node[graph->nodes - 1].pass.clamp;
    a.patch = strcmp(op, "encode") && self->model->arch.image_patch ? 2 : 1;
    Py_BEGIN_ALLOW_THREADS
    s = vm_said(d, d->blend(b, (void *)(uintptr_t)number, &a), NULL);
    Py_END_ALLOW_THREADS
    return vm_py_none_or_raise(s);
}
