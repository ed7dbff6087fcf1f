/* vaemem._kernels: operations of one instruction set, and single passes, on NumPy arrays, for tests (against a float64
 * reference) and benchmarks. Not for users, and in no wheel (setup.py). It checks shapes only where a wrong one would
 * touch memory outside an array. It links its own copy of the core. */
#include "../../kernels/cpu.h"
#include "py.h"
#include "py_numpy.h"

/* Returns: how a backend computes float32, or the given type. NULL with an exception set. */
static const vm_cpu *cpu_of(const char *name, vm_dtype dtype) {
    const vm_backend *b = vm_py_backend(name, dtype, VM_HIGHEST);
    return b ? b->self : NULL;
}

static const vm_cpu_ops *ops_of(const char *name) {
    const vm_cpu *cpu = cpu_of(name, VM_F32);
    return cpu ? cpu->ops : NULL;
}

/* Returns: the type of rows in an array of float32, float16, or uint16 that holds bfloat16. */
static vm_dtype rows_of(PyObject *o) {
    const int type = PyArray_Check(o) ? PyArray_TYPE((PyArrayObject *)o) : NPY_FLOAT;
    return type == NPY_HALF ? VM_F16 : type == NPY_UINT16 ? VM_BF16 : VM_F32;
}

static int numpy_type(vm_dtype dtype) { return dtype == VM_F16 ? NPY_HALF : dtype == VM_BF16 ? NPY_UINT16 : NPY_FLOAT; }

/* A C-contiguous array of `type` with at least `items` elements; NULL with an exception set. */
static void *data_of(PyObject *o, const char *what, int type, size_t items, bool writable) {
    PyArrayObject *a = (PyArrayObject *)o;
    if (!PyArray_Check(o) || PyArray_TYPE(a) != type || !PyArray_IS_C_CONTIGUOUS(a) ||
        (size_t)PyArray_SIZE(a) < items || (writable && !PyArray_ISWRITEABLE(a))) {
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("%s", "a contiguous array of at least %zu items", ""), what, items);
        return NULL;
    }
    return PyArray_DATA(a);
}

static PyObject *gemm(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *backend;
    PyObject *y, *x, *offsets, *w, *bias, *add;
    vm_gemm g = {.rows = 1};
    if (!PyArg_ParseTuple(args, "sOOOOOO(nnnnnnnnn)", &backend, &y, &x, &offsets, &w, &bias, &add, &g.pixels, &g.blocks,
                          &g.depth, &g.x_pixel, &g.w_block, &g.add_pixel, &g.add_block, &g.y_pixel, &g.y_block))
        return NULL;
    const bool pairs = PyArray_Check(x) && PyArray_TYPE((PyArrayObject *)x) == NPY_UINT32;
    const int type = pairs ? NPY_UINT32 : NPY_FLOAT;
    const vm_cpu *cpu = cpu_of(backend, pairs ? VM_BF16 : VM_F32);
    if (!cpu) return NULL;
    const vm_products *products = cpu->products;
    if (pairs && !cpu->pairs) return vm_py_refuse(PyExc_ValueError, "gemm: %s has no products of pairs", backend);
    if (g.pixels < 1 || g.pixels > products->max_pixels || g.blocks < 1 || g.blocks > 2)
        return vm_py_refuse(PyExc_ValueError, VM_EXPECTED("gemm", "1 to %zu pixels and 1 or 2 blocks", ""),
                            products->max_pixels);
    if (!(g.x_offset = data_of(offsets, "offsets", NPY_INTP, 0, false))) return NULL;
    g.batches = (size_t)PyArray_SIZE((PyArrayObject *)offsets);
    if (!(g.x = data_of(x, "x", type, 0, false)) || !(g.w = data_of(w, "w", type, 0, false)) ||
        !(g.y = data_of(y, "y", NPY_FLOAT, 0, true)))
        return NULL;
    if (bias != Py_None && !(g.bias = data_of(bias, "bias", NPY_FLOAT, g.blocks * VM_BLOCK, false))) return NULL;
    if (add != Py_None && !(g.add = data_of(add, "add", NPY_FLOAT, 0, false))) return NULL;
    products->gemm(&g);
    Py_RETURN_NONE;
}

/* load(backend, y, rest, x, scale, shift, act, factor=None): x of any rows' type; y float32; pairs: y, rest uint16. */
static PyObject *load(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *backend;
    PyObject *y, *rest, *x, *scale, *shift, *factor = Py_None;
    int act;
    if (!PyArg_ParseTuple(args, "sOOOOOi|O", &backend, &y, &rest, &x, &scale, &shift, &act, &factor)) return NULL;
    const bool pairs = rows_of(y) == VM_BF16;
    const vm_cpu *cpu = cpu_of(backend, pairs ? VM_BF16 : VM_F32);
    vm_source from = {.dtype = rows_of(x), .act = (vm_act)act};
    if (cpu && pairs && !cpu->pairs)
        return vm_py_refuse(PyExc_ValueError, "load: %s has no products of pairs", backend);
    if (!cpu || !(from.x = data_of(x, "x", numpy_type(from.dtype), 0, false))) return NULL;
    const size_t items = (size_t)PyArray_SIZE((PyArrayObject *)x);
    void *to = data_of(y, "y", pairs ? NPY_UINT16 : NPY_FLOAT, pairs ? 2 * items : items, true), *left = NULL;
    if (!to || (rest != Py_None && !(left = data_of(rest, "rest", NPY_UINT16, 2 * items, true)))) return NULL;
    if (scale != Py_None && (!(from.scale = data_of(scale, "scale", NPY_FLOAT, VM_BLOCK, false)) ||
                             !(from.shift = data_of(shift, "shift", NPY_FLOAT, VM_BLOCK, false))))
        return NULL;
    from.pixels = items / VM_BLOCK;
    if (factor != Py_None && !(from.factor = data_of(factor, "factor", NPY_FLOAT, from.pixels, false))) return NULL;
    cpu->products->load(to, left, &from);
    Py_RETURN_NONE;
}

/* store(backend, y, x, factor, add, relu=False) -> whether all of y is finite; y and add of any rows' type. */
static PyObject *store(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *backend;
    PyObject *y, *x, *add;
    float factor;
    int relu = false;
    if (!PyArg_ParseTuple(args, "sOOfO|p", &backend, &y, &x, &factor, &add, &relu)) return NULL;
    const vm_cpu_ops *ops = ops_of(backend);
    const float *from = ops ? data_of(x, "x", NPY_FLOAT, 0, false) : NULL;
    const size_t items = from ? (size_t)PyArray_SIZE((PyArrayObject *)x) : 0;
    const int type = numpy_type(rows_of(y));
    void *to = from ? data_of(y, "y", type, items, true) : NULL, *more = NULL;
    if (!to || (add != Py_None && !(more = data_of(add, "add", type, items, false)))) return NULL;
    return PyBool_FromLong(ops->store(to, rows_of(y), from, items / VM_BLOCK, factor, more, relu));
}

static PyObject *squares(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *backend;
    PyObject *sum, *x;
    if (!PyArg_ParseTuple(args, "sOO", &backend, &sum, &x)) return NULL;
    const vm_cpu_ops *ops = ops_of(backend);
    const void *xs = ops ? data_of(x, "x", numpy_type(rows_of(x)), 0, false) : NULL;
    const size_t items = xs ? (size_t)PyArray_SIZE((PyArrayObject *)x) : 0;
    float *to = xs ? data_of(sum, "sum", NPY_FLOAT, items, true) : NULL;
    if (!to) return NULL;
    ops->squares(to, xs, rows_of(x), items / VM_BLOCK);
    Py_RETURN_NONE;
}

static PyObject *stats(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *backend;
    PyObject *mean, *m2, *x;
    Py_ssize_t rows, row, pixels;
    if (!PyArg_ParseTuple(args, "sOOOnnn", &backend, &mean, &m2, &x, &rows, &row, &pixels)) return NULL;
    const vm_cpu_ops *ops = ops_of(backend);
    const size_t items = (size_t)((rows - 1) * row + pixels * VM_BLOCK);
    const void *xs = ops ? data_of(x, "x", numpy_type(rows_of(x)), items, false) : NULL;
    float *a = xs ? data_of(mean, "mean", NPY_FLOAT, VM_BLOCK, true) : NULL;
    float *b = a ? data_of(m2, "m2", NPY_FLOAT, VM_BLOCK, true) : NULL;
    if (!b) return NULL;
    ops->stats(a, b, xs, rows_of(x), (size_t)rows, (size_t)row, (size_t)pixels);
    Py_RETURN_NONE;
}

static PyObject *softmax(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *backend;
    PyObject *s, *top, *sum, *keep;
    float scale;
    if (!PyArg_ParseTuple(args, "sOfOOO", &backend, &s, &scale, &top, &sum, &keep)) return NULL;
    const vm_cpu_ops *ops = ops_of(backend);
    float *data = ops ? data_of(s, "s", NPY_FLOAT, 0, true) : NULL, *t = NULL, *u = NULL, *k = NULL;
    if (!data || !(t = data_of(top, "top", NPY_FLOAT, VM_BLOCK, true)) ||
        !(u = data_of(sum, "sum", NPY_FLOAT, VM_BLOCK, true)) ||
        !(k = data_of(keep, "keep", NPY_FLOAT, VM_BLOCK, true)))
        return NULL;
    ops->softmax(data, (size_t)PyArray_SIZE((PyArrayObject *)s) / VM_BLOCK, scale, t, u, k);
    Py_RETURN_NONE;
}

static PyObject *rescale(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *backend;
    PyObject *x, *keep;
    if (!PyArg_ParseTuple(args, "sOO", &backend, &x, &keep)) return NULL;
    const vm_cpu_ops *ops = ops_of(backend);
    float *xs = ops ? data_of(x, "x", NPY_FLOAT, 0, true) : NULL;
    const float *k = xs ? data_of(keep, "keep", NPY_FLOAT, VM_BLOCK, false) : NULL;
    if (!k) return NULL;
    ops->rescale(xs, (size_t)PyArray_SIZE((PyArrayObject *)x) / VM_BLOCK, k);
    Py_RETURN_NONE;
}

static PyObject *transpose(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *backend;
    PyObject *y, *x;
    if (!PyArg_ParseTuple(args, "sOO", &backend, &y, &x)) return NULL;
    const vm_cpu_ops *ops = ops_of(backend);
    float *ys = ops ? data_of(y, "y", NPY_FLOAT, VM_BLOCK * VM_BLOCK, true) : NULL;
    const float *xs = ys ? data_of(x, "x", NPY_FLOAT, VM_BLOCK * VM_BLOCK, false) : NULL;
    if (!xs) return NULL;
    ops->transpose(ys, xs);
    Py_RETURN_NONE;
}

/* ---- a pool of threads for the functions below ---- */

static vm_status open_pool(unsigned threads, vm_exec *out) {
    vm_pool *pool;
    vm_status s = vm_scratch_new(1, vm_pool_bytes(threads), &pool);
    if (s) return s;
    *out = (vm_exec){{threads, 0}, pool, vm_pool_each};
    if ((s = vm_pool_open(pool, threads, 0, NULL, NULL))) vm_scratch_free(pool);
    return s;
}

static void close_pool(const vm_exec *exec) {
    vm_pool_close(exec->pool);
    vm_scratch_free(exec->pool);
}

typedef struct peak_job {
    const vm_products *products;
    size_t rounds;
    double *flops; /* of each task */
} peak_job;

static void burn_one(const void *job, size_t task, unsigned thread) {
    (void)thread;
    const peak_job *j = job;
    float sink = 0;
    j->flops[task] = j->products->burn(j->rounds, &sink);
}

static PyObject *peak(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *backend;
    unsigned threads;
    double each[VM_PY_THREADS], flops = 0, seconds = 0;
    peak_job j = {.flops = each};
    vm_dtype dtype = VM_F32;
    vm_precision precision = VM_HIGHEST;
    if (!PyArg_ParseTuple(args, "sO&n|O&O&", &backend, vm_py_to_threads, &threads, &j.rounds, vm_py_to_dtype, &dtype,
                          vm_py_to_precision, &precision))
        return NULL;
    const vm_backend *b = vm_py_backend(backend, dtype, precision);
    if (!b) return NULL;
    const vm_cpu *cpu = b->self;
    j.products = cpu->products;
    vm_exec exec;
    vm_status s;
    Py_BEGIN_ALLOW_THREADS
    if (!(s = open_pool(threads, &exec))) {
        const double start = vm_now();
        s = exec.each(exec.pool, threads, 0, burn_one, &j);
        seconds = vm_now() - start;
        close_pool(&exec);
    }
    Py_END_ALLOW_THREADS
    if (s) return vm_py_raise(s);
    for (unsigned i = 0; i < threads; i++) flops += each[i];
    return PyFloat_FromDouble(flops / (cpu->pairs ? cpu->pairs : 1) / seconds);
}

static size_t rows_floats(const vm_shape *s) { return VM_BLOCKS(s->c) * VM_BLOCK * s->f * s->h * s->w; }

static vm_view whole(void *data, vm_dtype dtype, const vm_shape *s) {
    return (vm_view){data, dtype, s->f * s->w * VM_BLOCK, VM_BLOCKS(s->c) * VM_BLOCK * s->f * s->w, SIZE_MAX};
}

/* Returns: floats of an array for a pass's prepared memory and scratch, at any address. */
static size_t scratch_floats(const vm_needs *n) { return (n->prepared + n->scratch + VM_ALIGN) / sizeof(float); }

/* Parses conv, attention, or a move with the numbers of its order, frames, side and whether channels go in turn:
 * move0120. */
static vm_pass_kind kind_of(const char *kind, vm_move *move) {
    if (strncmp(kind, "move", 4)) return strcmp(kind, "conv") ? VM_PASS_ATTENTION : VM_PASS_CONV;
    *move = (vm_move){(vm_order)(kind[4] - '0'), (uint32_t)(kind[5] - '0'), (uint32_t)(kind[6] - '0'), kind[7] == '1'};
    return VM_PASS_MOVE;
}

/* run_pass(backend, threads, kind, (xc, xh, xw, yc, yh, yw), (ksize, stride, up, act, groups, eps, pad, relu), arrays,
 * dtype='float32', precision='highest', by_task=False,
 * (xf, yf, slices, skipped, time, turned, ahead, held, mirrored)=(1, 1, 1, 0, 0, 0, 0, 0, 0))
 * groups: -1 for a pixel norm, -2 for one by the root mean square. arrays: a tuple of x, y, add, weight, bias, gamma,
 * beta, x_stats, y_stats, scratch; None for absent ones; all rows. x, y, add and weight are of that dtype (bfloat16 as
 * uint16), the rest float32. */
static PyObject *run_pass(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *backend, *kind;
    unsigned threads;
    int up, act, relu, by_task = false, time = VM_TIME_SAME, turned = false, held = false, mirrored = false;
    double seconds = 0;
    PyObject *arrays, *a[10];
    vm_pass p = {.x.f = 1, .y.f = 1, .slices = 1, .x_scale = 1, .y_scale = 1};
    vm_dtype dtype = VM_F32;
    vm_precision precision = VM_HIGHEST;
    if (!PyArg_ParseTuple(args, "sO&s(nnnnnn)(iipinfip)O!|O&O&p(nnbbipbpp)", &backend, vm_py_to_threads, &threads,
                          &kind, &p.x.c, &p.x.h, &p.x.w, &p.y.c, &p.y.h, &p.y.w, &p.ksize, &p.stride, &up, &act,
                          &p.groups, &p.eps, &p.pad, &relu, &PyTuple_Type, &arrays, vm_py_to_dtype, &dtype,
                          vm_py_to_precision, &precision, &by_task, &p.x.f, &p.y.f, &p.slices, &p.skipped, &time,
                          &turned, &p.ahead, &held, &mirrored) ||
        !PyArg_ParseTuple(arrays, "OOOOOOOOOO", &a[0], &a[1], &a[2], &a[3], &a[4], &a[5], &a[6], &a[7], &a[8], &a[9]))
        return NULL;
    const vm_backend *b = vm_py_backend(backend, dtype, precision);
    if (!b) return NULL;
    p.kind = kind_of(kind, &p.move);
    p.up = up;
    p.act = (vm_act)act;
    p.relu = relu;
    p.time = (vm_time)time;
    p.turned = turned;
    p.held = held;
    p.mirrored = mirrored;
    p.norm = p.groups == (size_t)-1   ? VM_NORM_PIXEL
             : p.groups == (size_t)-2 ? VM_NORM_RMS
             : p.groups               ? VM_NORM_GROUP
                                      : VM_NORM_NONE;
    if (vm_norm_by_pixel(p.norm)) p.groups = 0;
    p.add = a[2] != Py_None;
    p.stats = a[8] != Py_None;
    p.clamp.from = (uint32_t)p.y.c;
    p.scale_channels = p.y.c;
    const size_t xc = VM_BLOCKS(p.x.c) * VM_BLOCK;
    const size_t parts = p.time == VM_TIME_DOUBLED ? 2 : 0, out = parts ? 2 * p.y.c : p.y.c;
    const vm_weight w = {out, p.x.c, (size_t)p.ksize, .past = p.slices + p.skipped - 1, .frames = true, .parts = parts};
    const bool conv = p.kind == VM_PASS_CONV;
    const vm_limits limits = {threads, 0};
    const vm_manner manner = {b->cut(b, &p, by_task).rows, false, by_task};
    const vm_needs needed = b->needs(b, &p, &limits, manner);
    const size_t need[10] = {rows_floats(&p.x),
                             rows_floats(&p.y),
                             rows_floats(&p.y),
                             conv ? vm_packed_bytes(dtype, &w) / vm_dtype_bytes(dtype) : 0,
                             conv ? vm_weight_lanes(&w) : 0,
                             xc,
                             xc,
                             0,
                             needed.parts * vm_stats_floats(p.y.c),
                             scratch_floats(&needed)};
    void *d[10] = {0};
    for (int i = 0; i < 10; i++)
        if (a[i] != Py_None &&
            !(d[i] = data_of(a[i], "array", i < 4 ? numpy_type(dtype) : NPY_FLOAT, need[i], i == 1 || i > 7)))
            return NULL;
    bool overflow = false;
    vm_operands at = {.x = whole(d[0], dtype, &p.x),
                      .y = whole(d[1], dtype, &p.y),
                      .add = whole(d[2], dtype, &p.y),
                      .overflow = &overflow,
                      .weight = d[3],
                      .bias = d[4],
                      .gamma = d[5],
                      .beta = d[6],
                      .x_stats = d[7],
                      .y_stats = d[8],
                      .prepared = (void *)VM_ROUND_UP((uintptr_t)d[9], VM_ALIGN),
                      .manner = manner,
                      .scratch_each = needed.scratch / limits.threads};
    at.scratch = (char *)at.prepared + needed.prepared;
    at.x_parts = d[7] ? (size_t)PyArray_SIZE((PyArrayObject *)a[7]) / vm_stats_floats(p.x.c) : 0;
    if (p.kind == VM_PASS_ATTENTION) at.y = at.x; /* attention's result overwrites its queries */
    vm_exec exec;
    vm_status s;
    Py_BEGIN_ALLOW_THREADS
    if (!(s = open_pool(threads, &exec))) {
        const double start = vm_now();
        s = b->run(b, &p, &at, &exec);
        seconds = vm_now() - start;
        close_pool(&exec);
    }
    Py_END_ALLOW_THREADS
    return s ? vm_py_raise(s) : PyFloat_FromDouble(seconds);
}

/* needs(backend, threads, kind, shapes, (ksize, stride, up, pad), dtype='float32', precision='highest',
 * by_task=False, (xf, yf, slices, time)=(1, 1, 1, 0)) -> (scratch floats, y_stats floats) */
static PyObject *needs(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *backend, *kind;
    unsigned threads;
    int up, by_task = false, time = VM_TIME_SAME;
    vm_pass p = {.x.f = 1, .y.f = 1, .slices = 1, .x_scale = 1, .y_scale = 1};
    vm_dtype dtype = VM_F32;
    vm_precision precision = VM_HIGHEST;
    if (!PyArg_ParseTuple(args, "sO&s(nnnnnn)(iipi)|O&O&p(nnbi)", &backend, vm_py_to_threads, &threads, &kind, &p.x.c,
                          &p.x.h, &p.x.w, &p.y.c, &p.y.h, &p.y.w, &p.ksize, &p.stride, &up, &p.pad, vm_py_to_dtype,
                          &dtype, vm_py_to_precision, &precision, &by_task, &p.x.f, &p.y.f, &p.slices, &time))
        return NULL;
    const vm_backend *b = vm_py_backend(backend, dtype, precision);
    if (!b) return NULL;
    p.kind = kind_of(kind, &p.move);
    p.up = up;
    p.time = (vm_time)time;
    p.norm = VM_NORM_PIXEL, p.stats = true; /* the most that the pass can need */
    const vm_limits limits = {threads, 0};
    const vm_needs needed = b->needs(b, &p, &limits, (vm_manner){b->cut(b, &p, by_task).rows, false, by_task});
    return Py_BuildValue("nn", (Py_ssize_t)scratch_floats(&needed),
                         (Py_ssize_t)(needed.parts * vm_stats_floats(p.y.c)));
}

static PyMethodDef functions[] = {
    {"gemm", gemm, METH_VARARGS, "For tests: vm_products.gemm, of pairs if x and w are uint32."},
    {"load", load, METH_VARARGS, "For tests: vm_products.load, of pairs if y is uint16."},
    {"store", store, METH_VARARGS, "For tests: vm_cpu_ops.store."},
    {"squares", squares, METH_VARARGS, "For tests: vm_cpu_ops.squares."},
    {"stats", stats, METH_VARARGS, "For tests: vm_cpu_ops.stats."},
    {"softmax", softmax, METH_VARARGS, "For tests: vm_cpu_ops.softmax."},
    {"rescale", rescale, METH_VARARGS, "For tests: vm_cpu_ops.rescale."},
    {"transpose", transpose, METH_VARARGS, "For tests: vm_cpu_ops.transpose."},
    {"peak", peak, METH_VARARGS,
     "For benchmarks: FLOP/s of a model's products on registers, on some threads. Split numbers count three "
     "products of the unit as one."},
    {"run_pass", run_pass, METH_VARARGS,
     "For tests and benchmarks: runs one pass on arrays of rows. Returns its seconds."},
    {"needs", needs, METH_VARARGS, "For tests and benchmarks: returns the floats of scratch and sums of such a pass."},
    {NULL, NULL, 0, NULL}};

static int exec_module(PyObject *Py_UNUSED(module)) { return PyArray_ImportNumPyAPI(); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)exec_module},
#ifdef Py_mod_multiple_interpreters
                                   {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
                                   {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "vaemem._kernels",
                                        .m_doc = "The kernels one by one.", .m_methods = functions, .m_slots = slots};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
