/* vaemem._core.Model.plan, run, reserve and blend. */
#include "py_model.h"

static PyObject *bytes_dict(const size_t bytes[VM_CATEGORIES]) {
    return Py_BuildValue("{s:n, s:n, s:n, s:n, s:n}", "weights", (Py_ssize_t)bytes[VM_WEIGHTS], "activations",
                         (Py_ssize_t)bytes[VM_ACTIVATIONS], "scratch", (Py_ssize_t)bytes[VM_SCRATCH], "workspace",
                         (Py_ssize_t)bytes[VM_WORKSPACE], "output", (Py_ssize_t)bytes[VM_OUTPUT]);
}

/* A plan's figures, or a run's measurements. */
typedef struct plan_and_run {
    const vm_plan *plan;
    const vm_run *run;
} plan_and_run;

static PyObject *step_item(const void *context, size_t i) {
    const plan_and_run *t = context;
    const vm_step *s = &t->plan->step[i];
    const vm_chain *c = t->plan->chain;
    while (c->last < (int)i) c++;
    return Py_BuildValue("{s:s, s:N, s:d, s:d, s:O}", "name", t->plan->graph->node[i].name, "live",
                         bytes_dict(t->run ? c->measured : c->live), "flops", s->flops * (double)t->plan->request.batch,
                         "seconds", s->seconds, "streamed", s->streamed ? Py_True : Py_False);
}

static PyObject *summary(const vm_plan *plan, const vm_run *run) {
    PyObject *steps = vm_py_list(plan->steps, step_item, &(plan_and_run){plan, run});
    if (!steps) return NULL;
    return Py_BuildValue("{s:N, s:n, s:n, s:s, s:i, s:d, s:N, s:N}", "peak", bytes_dict(run ? run->peak : plan->peak),
                         "reserved", (Py_ssize_t)(run ? run->reserved : plan->reserved), "arena",
                         (Py_ssize_t)(plan->arena_bytes + (run ? run->reserved - plan->reserved : 0)), "backend",
                         plan->request.backend->name, "threads", (int)plan->request.limits.threads, "work", plan->work,
                         "steps", steps, "overflow", PyBool_FromLong(run && run->overflow));
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
    vm_py_refuse(PyExc_ValueError, VM_EXPECTED("%s", "float or uint8%s", "'%s'"), what,
                 on_host(m) ? "" : ", float32, float16 or bfloat16", name);
    return -1;
}

/* Parses the arguments that three methods share. pixels, latents: their formats (NULL: float). */
static int parse_request(Model *self, vm_request *r, const char *op, const char *pixels, const char *latents,
                         unsigned threads, const char *backend) {
    vm_model *m = self->model;
    vm_format image = VM_ROWS, latent = VM_ROWS;
    r->op = !strcmp(op, "encode") ? VM_ENCODE : VM_DECODE;
    if (r->op == VM_DECODE && strcmp(op, "decode")) {
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("op", "encode or decode", "'%s'"), op);
        return -1;
    }
    if (parse_format(pixels, "pixels", m, &image) || parse_format(latents ? latents : "float", "latents", m, &latent))
        return -1;
    r->in = r->op == VM_ENCODE ? image : latent;
    r->out = r->op == VM_ENCODE ? latent : image;
    r->limits.threads = on_host(m) ? threads : 1;
    if (!on_host(m) && backend && *backend) {
        vm_py_refuse(PyExc_ValueError, "backend: this model lives on %s, got %s", m->backend->name, backend);
        return -1;
    }
    return (r->backend = on_host(m) ? vm_py_backend(backend, m->backend->dtype, m->backend->precision) : m->backend)
               ? 0
               : -1;
}

/* Checks sizes, which were parsed as signed. */
static int check_sizes(const vm_request *r) {
    const size_t value[] = {r->height, r->width, r->batch, r->frames, r->memory_limit};
    static const char *const name[] = {"height", "width", "batch", "frames", "memory_limit"};
    for (int i = 0; i < 5; i++)
        if (value[i] > PY_SSIZE_T_MAX) {
            vm_py_refuse(PyExc_ValueError, VM_EXPECTED("%s", "a positive number", "%zd"), name[i],
                         (Py_ssize_t)value[i]);
            return -1;
        }
    return 0;
}

/* Raises a refused plan; a limit that is too low as ArgumentError with the attribute smallest, in bytes. */
static PyObject *raise_plan(vm_status s, const vm_plan *plan) {
    if (s != VM_ELIMIT) return vm_py_raise(s);
    PyObject *error = vm_py_argument_error("ArgumentError", PyUnicode_FromString(vm_error_parts()));
    PyObject *smallest = error ? PyLong_FromSize_t(plan->reserved) : NULL;
    if (smallest && !PyObject_SetAttrString(error, "smallest", smallest))
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(smallest);
    Py_XDECREF(error);
    return NULL;
}

const char vm_py_plan_doc[] =
    "plan(op, height, width, batch=1, pixels='float', threads=1, scaled=False, backend=None, own_output=True, "
    "host_arrays=True, latents='float', memory_limit=0, frames=1)\n--\n\nReturns what a run would take, as a dict. "
    "host_arrays: the user's arrays are in host memory, not in the device's.";

PyObject *vm_py_plan(Model *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"op",      "height",     "width",       "batch",   "pixels",       "threads", "scaled",
                            "backend", "own_output", "host_arrays", "latents", "memory_limit", "frames",  NULL};
    const char *op, *pixels = "float", *latents = NULL, *backend = NULL;
    unsigned threads = 1;
    int scaled = 0, own_output = 1, host_arrays = 1;
    vm_request r = {.batch = 1, .frames = 1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "snn|nsO&pzppznn", names, &op, &r.height, &r.width, &r.batch,
                                     &pixels, vm_py_to_threads, &threads, &scaled, &backend, &own_output, &host_arrays,
                                     &latents, &r.memory_limit, &r.frames))
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

/* An output block that outlives the run: an array's base, or the owner of a device's array. */
typedef struct block {
    vm_mem *mem;
    PyObject *backend; /* of the block's device, or NULL */
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

/* Returns: a capsule that owns the block. On failure the caller still owns it. */
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
    "reserve(bytes)\n--\n\nReturns (address, owner): memory of the model's device, freed with owner.";

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

/* A run's arguments and results. */
typedef struct job {
    vm_run run;
    PyObject *owner;    /* new reference: the capsule of an output that the run allocated */
    PyObject *record;   /* new reference */
    PyObject *callback; /* or NULL */
} job;

/* Plans and runs, with the lock held. -1 with an exception set; nothing is kept then. */
static int run_locked(Model *self, const vm_request *r, job *j) {
    vm_model *m = self->model;
    vm_run *run = &j->run;
    polling p = {NULL, j->callback};
    vm_plan *plan;
    vm_status s;
    run->poll = poll;
    run->poll_context = &p;
    p.thread = PyEval_SaveThread();
    s = vm_plan_for_run(m, r, &plan);
    if (!s) s = vm_plan_run(m, plan, run);
    PyEval_RestoreThread(p.thread);
    if (s)
        raise_plan(s, plan);
    else if (!run->out_mem || (j->owner = own(self, run->out_mem, run->out, run->out_bytes)))
        j->record = summary(plan, run);
    else
        vm_mem_unreserve(run->out_mem, run->out, run->out_bytes);
    const size_t rows = s ? 0 : plan->rows;
    if (j->record)
        vm_plan_keep(m, plan);
    else
        vm_plan_free(m, plan);
    if (j->record && j->callback) {
        PyObject *done = PyObject_CallFunction(j->callback, "nn", (Py_ssize_t)rows, (Py_ssize_t)rows);
        if (!done) Py_CLEAR(j->record);
        Py_XDECREF(done);
    }
    if (!j->record) Py_CLEAR(j->owner);
    return j->record ? 0 : -1;
}

/* For PyArg_ParseTuple's O&: a callable, or NULL for None. */
static int to_callback(PyObject *object, void *out) {
    *(PyObject **)out = object == Py_None ? NULL : object;
    if (object == Py_None || PyCallable_Check(object)) return 1;
    vm_py_refuse_type("poll", "a callable", object);
    return 0;
}

const char vm_py_run_doc[] =
    "run(op, input, out, height, width, batch=1, pixels='float', latents='float', threads=1, scaled=False, "
    "backend=None, host_arrays=True, stream=0, wait=True, poll=None, check=False, scale=1.0, replay=False, "
    "own_output=False, memory_limit=0, unclamped=False, strides=(0, 0, 0, 0, 0), numbers=('f', 4, "
    "False), frames=1)\n--\n\nReturns (address of the output, its owner or None, what the run took as a dict). "
    "input, out: addresses, in host memory or in the device's; out 0: the run allocates it. own_output: out was "
    "allocated "
    "for this run and counts. strides: bytes from item, channel, frame, row and pixel of the input to the next. "
    "numbers: NumPy's kind (b: bfloat16), bytes, and whether they are swapped. A device reads only its own "
    "formats: packed with host_arrays, otherwise packed or part of an image. poll(rows_done, rows_total) is "
    "called about 20 times a second and once at the end. unclamped: log-variances may leave [-30, 20].";

PyObject *vm_py_run(Model *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"op",      "input",   "out",    "height",  "width",       "batch",        "pixels",
                            "latents", "threads", "scaled", "backend", "host_arrays", "stream",       "wait",
                            "poll",    "check",   "scale",  "replay",  "own_output",  "memory_limit", "unclamped",
                            "strides", "numbers", "frames", NULL};
    const char *op, *pixels = "float", *latents = NULL, *backend = NULL;
    unsigned long long in, out, stream = 0;
    unsigned threads = 1;
    PyObject *callback = NULL;
    int scaled = 0, host_arrays = 1, wait = 1, check = 0, replay = 0, own_output = 0, unclamped = 0;
    int kind = 'f', size = sizeof(float), swapped = 0;
    Py_ssize_t item = 0, channel = 0, row = 0, pixel = 0, frame = 0;
    vm_request r = {.batch = 1, .frames = 1, .scale = 1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sKKnn|nszO&pzpKpO&pfppnp(nnnnn)(Cip)n", names, &op, &in, &out,
                                     &r.height, &r.width, &r.batch, &pixels, &latents, vm_py_to_threads, &threads,
                                     &scaled, &backend, &host_arrays, &stream, &wait, to_callback, &callback, &check,
                                     &r.scale, &replay, &own_output, &r.memory_limit, &unclamped, &item, &channel,
                                     &frame, &row, &pixel, &kind, &size, &swapped, &r.frames))
        return NULL;
    if (parse_request(self, &r, op, pixels, latents, threads, backend) || check_sizes(&r) ||
        vm_py_acquire(&self->lock, op))
        return NULL;
    r.scaled = scaled;
    r.host_arrays = host_arrays;
    r.own_output = own_output || !out;
    r.unclamped = unclamped;
    job j = {.run = {.in = {.data = (const void *)(uintptr_t)in,
                            .kind = (char)kind,
                            .size = (size_t)size,
                            .swapped = swapped,
                            .item = item,
                            .channel = channel,
                            .frame = frame,
                            .row = row,
                            .pixel = pixel},
                     .out = (void *)(uintptr_t)out,
                     .stream = (void *)(uintptr_t)stream,
                     .wait = wait,
                     .replay = replay && !on_host(self->model),
                     .check = check},
             .callback = callback};
    const int failed = run_locked(self, &r, &j);
    vm_py_release(&self->lock);
    if (failed) return NULL;
    PyObject *owner = j.owner ? j.owner : Py_NewRef(Py_None);
    return Py_BuildValue("(KNN)", (unsigned long long)(uintptr_t)j.run.out, owner, j.record);
}

const char vm_py_blend_doc[] =
    "blend(stream, op, format, **fields)\n--\n\nBlends a tile into its image. op: encode or decode, for the "
    "clamp. fields: all others of kernels.h's vm_blend_args, addresses as integers. stream: of the model's "
    "device; None: everything is in host memory.";

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
    const vm_graph *graph = vm_passes_of(self->model, strcmp(op, "encode") ? VM_DECODE : VM_ENCODE, 1);
    a.clamp = graph->node[graph->nodes - 1].pass.clamp;
    a.patch = strcmp(op, "encode") && self->model->arch.image_patch ? 2 : 1;
    Py_BEGIN_ALLOW_THREADS
    s = vm_device_fail(d, d->blend(b, (void *)(uintptr_t)number, &a), NULL);
    Py_END_ALLOW_THREADS
    return vm_py_none_or_raise(s);
}
